"""Callbacks for trainers, one module for each library; a module imports its library, this package imports none."""
