"""Metrics, tables and pages of an iteration, and the watchers of its metrics."""
