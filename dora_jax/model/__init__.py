"""One decoder-only transformer for trainer and generators."""
