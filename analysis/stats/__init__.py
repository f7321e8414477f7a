"""Statistics: intervals, paired differences, trends, adjusted p-values, times to an event, learning curves."""
