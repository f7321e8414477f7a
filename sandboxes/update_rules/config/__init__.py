"""Settings of the sandbox, and combinations that it rejects."""
