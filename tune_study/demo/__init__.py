"""A recorded study, which shows the files and results of a study without training anything."""
