"""The host: its GPUs, its resource usage, its fitness, and its answers to a supervisor."""
