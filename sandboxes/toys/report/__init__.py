"""The report of studies of toy tasks."""
