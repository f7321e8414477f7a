"""Studies whose arms lie along one axis: tables, curves, verdicts and figures."""
