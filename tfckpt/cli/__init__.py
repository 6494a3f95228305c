"""The command line: `python -m tfckpt`, one module for each command."""
