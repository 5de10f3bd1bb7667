"""Other people's samplers, each a script for an environment of its own."""
