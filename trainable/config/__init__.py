"""every setting: typed, bounded, documented; one way to override them."""
