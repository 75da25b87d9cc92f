"""The host: its GPUs, what its processes use, whether it is fit, and what a supervisor asks it."""
