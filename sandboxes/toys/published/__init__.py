"""Published numbers of the sandboxes, and the comparison with them."""
