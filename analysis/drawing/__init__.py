"""Save figures whose labels contain names from a study."""
