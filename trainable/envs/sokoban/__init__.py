"""Sokoban: board, published rooms, solver, text, prompt."""
