"""Runs of other trainers: which run is which arm and seed."""
