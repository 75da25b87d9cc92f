"""The folder that a template of workers has on its path, and in it the template's program."""
