"""What is measured and drawn of an iteration, and what watches it."""
