"""Backends, which own the optimizer of some networks: torch on one device, or DeepSpeed over several ranks."""
