"""small models for several members at once, and their decoding."""
