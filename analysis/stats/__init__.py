"""intervals, paired differences, trends, adjusted p-values."""
