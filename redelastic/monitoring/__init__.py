"""A run from outside: its records, what it can be asked to do, and its history."""
