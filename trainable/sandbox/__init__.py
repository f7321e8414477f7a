"""update rules on toy tasks, all seeds of an arm side by side."""
