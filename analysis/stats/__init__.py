"""Intervals, noise of runs, sequential tests, trends, times to an event, edges, change points, learning curves."""
