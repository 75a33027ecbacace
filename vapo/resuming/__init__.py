"""Checkpoints, what else a run keeps, and stopping in good order."""
