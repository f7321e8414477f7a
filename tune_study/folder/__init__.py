"""The study's folder, local and in a storage, and how to continue it."""
