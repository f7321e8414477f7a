"""Report of update-rule studies: tables, declared contrasts, figures, page."""
