"""the study's folder, here and in a storage, and running it again."""
