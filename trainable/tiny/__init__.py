"""The shipped policies: their weights, their tokenizers and the recipe that makes them."""
