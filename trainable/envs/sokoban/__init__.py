"""Sokoban: board, published levels, solver, text rendering."""
