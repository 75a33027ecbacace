"""Compares the critic's values with true ones, from continuations (docs/value_truth.md)."""
