"""filters, advantages, losses, estimators: pure tensor functions."""
