"""the update rules: formula, gradient, what each needs."""
