"""Intervals, noise of runs, sequential tests, trends, times to an event, edges, changes, learning curves."""
