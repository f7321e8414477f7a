"""All charts: vega-lite by Altair, as interactive charts, SVG, PNG and PDF. Functions draw tables and compute nothing."""
