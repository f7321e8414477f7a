"""On-policy distillation: a student learns from a teacher on its samples."""
