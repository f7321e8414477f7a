"""The study's folder, local or in a storage, and how to continue it."""
