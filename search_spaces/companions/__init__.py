"""Studies of the companions of the update-rule sandbox: distillation, vector rewards, pedagogy."""
