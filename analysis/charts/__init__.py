"""All charts: Vega-Lite by Altair, shown in pages and saved as SVG, PNG and PDF. They draw tables and compute nothing."""
