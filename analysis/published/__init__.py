"""Published numbers, and our runs compared with them."""
