"""sokoban-tiny: its weights, its tokenizer and the recipe that makes it."""
