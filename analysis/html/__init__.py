"""templates, formats, figures as elements of a page."""
