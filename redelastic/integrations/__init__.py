"""Callbacks for trainers, one module per library, which imports it; the package itself imports none."""
