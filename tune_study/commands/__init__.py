"""the command line: what each command does."""
