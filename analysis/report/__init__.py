"""Writes one HTML report per study, and an index of all studies."""
