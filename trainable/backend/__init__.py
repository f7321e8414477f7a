"""Who owns optimizer and weights: one device, or DeepSpeed over ranks."""
