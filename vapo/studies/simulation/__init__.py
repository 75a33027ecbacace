"""The module's own training step on fake tensors and ranks, behind `vapo estimate`."""
