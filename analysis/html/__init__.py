"""HTML pages: templates, number formats, and figures as SVG elements."""
