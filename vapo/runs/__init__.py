"""Runs: folders, checkpoints, stopping and resuming."""
