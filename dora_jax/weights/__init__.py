"""Versions of the params: who holds them, and how they move."""
