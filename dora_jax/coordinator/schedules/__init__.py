"""Strategies of the one machine: what to admit, and when to train on what."""
