"""Declarations of studies: question, axis and contrasts; and every study by name."""
