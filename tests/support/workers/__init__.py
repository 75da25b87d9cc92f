"""Training scripts that the tests give to torchrun."""
