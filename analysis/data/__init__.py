"""Reads run folders into tidy frames, and selects the runs to compare."""
