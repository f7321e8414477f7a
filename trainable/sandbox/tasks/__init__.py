"""tasks: sequences, and bandits over images and text."""
