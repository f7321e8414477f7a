"""What a notebook asks of a study: its frames, charts of them, and single runs that can be restored."""
