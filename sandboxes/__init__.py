"""Sandboxes: separate packages that each study one part of the method, with studies of the same kind."""
