"""Benchmarks: one question per file, on a shared harness. See README.md beside this file."""
