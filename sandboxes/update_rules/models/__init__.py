"""Ensembles of small models, and decoding."""
