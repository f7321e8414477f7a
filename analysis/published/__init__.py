"""numbers that others published, and ours against them."""
