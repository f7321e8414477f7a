"""tables and figures to one page per study, and an index."""
