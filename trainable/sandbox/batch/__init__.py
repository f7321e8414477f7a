"""rollouts of several members at once, and noise in their rewards."""
