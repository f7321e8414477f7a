"""The interface of games, their level sets, prompts and chat formats."""
