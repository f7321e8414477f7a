"""Code that the sandboxes of toy tasks share: networks, ensembles, studies and their report."""
