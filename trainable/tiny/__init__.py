"""sokoban-tiny, the shipped policy: its weights, its tokenizer and the recipe that makes them."""
