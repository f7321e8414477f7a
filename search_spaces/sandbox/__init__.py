"""Studies of update rules on toy tasks."""
