"""Compare whole studies: their settings, and the arms that they have in common."""
