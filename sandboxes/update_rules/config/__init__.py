"""Settings of the sandbox, and the combinations that it rejects."""
