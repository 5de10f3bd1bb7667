"""Tests of dora_jax.generator."""
