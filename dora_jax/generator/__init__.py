"""Rollout: prompts to trajectories by continuous batching on slots and pages."""
