"""Compiled code for the tiny Qwen2 policies: sampling, and the layers of whole sequences."""
