"""Estimate how much GPU memory, host memory and disk the runs need, and whether they fit."""
