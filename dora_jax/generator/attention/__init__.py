"""Attention over the pages of a KV pool, one module a kind of device."""
