"""A smoke test of a run: what its first iterations take, and what the whole run would take."""
