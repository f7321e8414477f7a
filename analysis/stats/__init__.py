"""Intervals, noise of runs, power, sequential tests, trends, times to an event, learning curves."""
