"""Charts of tables: Vega-Lite by Altair, drawn in pages and saved as files."""
