"""Vector Policy Optimization: sets of candidates for rewards with several objectives."""
