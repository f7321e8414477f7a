"""a run on disk: rows, states, stop rules, failures, leftovers."""
