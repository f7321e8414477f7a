"""Update rules on toy tasks, with all seeds of an arm trained together."""
