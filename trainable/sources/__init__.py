"""Logs of other trainers: a module per format, and the table that translates names."""
