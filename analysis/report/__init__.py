"""Reports as lists of sections: a page per study, an index of several, and a comparison of studies."""
