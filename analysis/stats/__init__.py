"""Statistics: intervals, the noise of runs, power, sequential tests, trends and adjusted p-values."""
