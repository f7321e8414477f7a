"""On-policy distillation: a student learns from a teacher on the sequences that the student samples."""
