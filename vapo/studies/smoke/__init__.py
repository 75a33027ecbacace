"""A smoke test of a run: what its first iterations need, and what the whole run would need."""
