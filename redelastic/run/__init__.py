"""A run from outside: its records, what people may ask of it, and its history."""
