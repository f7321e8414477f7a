"""update rules: tables, declared contrasts, figures, page."""
