"""Statistics: intervals, paired differences, trends and adjusted p-values."""
