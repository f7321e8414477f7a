"""Turn a study and options into named runs."""
