"""A run's folder in an object store or a shared folder."""
