"""Recorded studies, and the pages about them."""
