"""Run the rounds of a search, and successive halving of its runs."""
