"""run folders to tidy frames, and which runs are compared."""
