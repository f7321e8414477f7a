"""Statistics: intervals, the noise of runs, power, sequential tests, trends, times to an event and learning curves."""
