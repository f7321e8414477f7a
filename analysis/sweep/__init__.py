"""Studies whose arms lie along one axis: tables, curves and verdicts."""
