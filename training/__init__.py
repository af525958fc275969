"""Scripts that make checkpoints for this server; nothing here runs while it serves."""
