"""All charts: Vega-Lite by Altair, drawn in pages and saved as files. They draw tables and compute nothing."""
