"""Backends, which own the optimizer: torch on one device, or DeepSpeed over several ranks."""
