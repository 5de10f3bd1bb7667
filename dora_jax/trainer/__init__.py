"""Training: groups to the next version."""
