"""Decisions, pure: events in, commands out."""
