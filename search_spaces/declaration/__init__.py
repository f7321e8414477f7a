"""Data classes that declare a study, a family of studies and a preset."""
