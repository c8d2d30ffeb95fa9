"""The command line: what each command calls and prints, and its exit code."""
