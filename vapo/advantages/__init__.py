"""Advantages and value targets of a rollout batch."""
