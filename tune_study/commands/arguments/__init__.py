"""The words of a command line: options, files of settings, and how words are read."""
