"""arms along an axis: tables, curves, verdicts, figures."""
