"""Intervals, noise of runs, power, sequential tests, trends, times to an event, edges, changes, learning curves."""
