"""Rollout: prompts to trajectories, continuously batched on slots and pages."""
