"""Logs of other trainers: each format is read by a module, and `names.csv` translates the names of measurements."""
