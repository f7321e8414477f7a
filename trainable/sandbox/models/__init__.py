"""ensembles of small models, and decoding."""
