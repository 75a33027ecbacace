"""Writes files that are never half written, and reads rows of data with limits on their size."""
