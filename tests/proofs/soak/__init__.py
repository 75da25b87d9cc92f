"""A randomised soak: real nodes, real faults in a mix, and a checker that knows only what was seen.

``python -m tests.proofs.soak --seed 7 --minutes 10 --server-faults`` runs one,
``python -m tests.proofs.soak --check HISTORY`` judges a recorded history again.
"""
