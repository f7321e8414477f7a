"""Runs whose trainer is a command of yours: their settings, their process, and the rows of its logs."""
