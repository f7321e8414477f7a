"""studies of update rules on toy tasks."""
