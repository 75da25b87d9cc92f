"""Scripts that run as workers of the tests' nodes, or as other processes that tests start."""
