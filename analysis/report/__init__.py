"""Reports as lists of sections: one HTML page per study, and an index of several."""
