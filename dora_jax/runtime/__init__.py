"""The threads that carry out the coordinator's commands."""
