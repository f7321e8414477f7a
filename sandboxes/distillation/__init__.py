"""On-policy distillation: a student learns from a teacher along its own samples."""
