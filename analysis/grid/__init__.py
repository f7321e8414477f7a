"""Studies whose arms form a grid of factors: panels, heat maps, and the edges of a dose."""
