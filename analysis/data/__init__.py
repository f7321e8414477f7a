"""Read run folders into tidy frames, and select the runs to compare."""
