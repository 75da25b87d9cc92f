"""``redelastic preflight``: a slow or broken host by name, before a job trains on it.

All hosts of a job meet in a rendezvous of its own, and go through the same steps: each measures itself, then pairs
measure their links, with changing partners, then all sum one tensor. ``schedule.py`` and ``verdict.py`` are pure:
which step is next, with which pairs, and who is an outlier. ``measures.py`` measures, in the process of ``probe.py``,
which can be killed when it hangs; ``meeting.py`` exchanges what was found, by a store in Redis; ``host.py`` is one
host's part.
"""
