"""Metrics, tables and pages of an iteration, and the watchers that warn about its metrics."""
