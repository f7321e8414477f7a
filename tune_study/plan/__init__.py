"""From a study and options to named runs."""
