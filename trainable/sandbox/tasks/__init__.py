"""What the sandbox trains on: sequence tasks, a classification bandit, and a bandit of a language model."""
