"""Studies whose arms form a grid of factors: panels, heat maps, switches, and the edges of a dose."""
