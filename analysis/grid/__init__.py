"""arms on a grid of factors: panels, heat maps, switches."""
