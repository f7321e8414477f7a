"""Published results of the sandboxes, and the comparison with them."""
