"""gradient analyses: tables, published keys, figures."""
