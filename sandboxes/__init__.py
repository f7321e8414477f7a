"""Sandboxes: separate pieces that study one part of the method each, as studies of the same kind."""
