"""the games, and how a conversation about them is written."""
