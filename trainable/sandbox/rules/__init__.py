"""Update rules by family: pure functions from a batch and the log-probabilities of its positions to a loss."""
