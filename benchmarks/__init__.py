"""Benchmarks: one question a file, on the shared harness. See README.md beside this file."""
