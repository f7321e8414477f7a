"""How much GPU, memory and disk the runs need, and whether they fit."""
