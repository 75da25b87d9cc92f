"""The folder that a worker template has on its path, with the template's program in it."""
