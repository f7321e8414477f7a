"""Sokoban: board, published levels, solver, text, prompt."""
