"""The command line: run, golden, and what the scripts call."""
