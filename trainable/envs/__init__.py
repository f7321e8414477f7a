"""Environments, and the chat format of conversations about them."""
