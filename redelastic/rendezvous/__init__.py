"""A node's part in a run: its settings, its view, its membership, and torch's handler and backend on top."""
