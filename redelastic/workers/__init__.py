"""The workers of a node: their processes, their progress, their stacks, and their end."""
