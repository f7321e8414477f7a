"""bandits, sequences, classification, a language-model bandit."""
