"""What was measured, so that anybody can measure it again."""
