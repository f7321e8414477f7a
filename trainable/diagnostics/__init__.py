"""Gradients by reward spread, and how much thoughts depend on prompts."""
