"""Studies of questions that practitioners answer differently; their recorded results are pages of docs/findings."""
