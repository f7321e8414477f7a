"""what runs take of GPUs, memory and disk, and whether it fits."""
