"""RL for language models by multi-version streaming rollout."""
