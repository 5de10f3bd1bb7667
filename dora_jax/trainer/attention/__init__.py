"""Attention within the segments of packed rows, on whatever devices."""
