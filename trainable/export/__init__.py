"""A trained policy as a folder in the layout of the Hugging Face hub."""
