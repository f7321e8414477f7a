"""Training of single runs, which know nothing of the study that they belong to."""
