"""The words of a command line: options, groups of options, files of settings, and how words are read."""
