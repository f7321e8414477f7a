"""Studies of questions that practitioners answer differently; docs/findings has their answers."""
