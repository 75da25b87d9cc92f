"""A node's part in a run: what it is and knows, how it is kept in the run, and torch's handler and backend."""
