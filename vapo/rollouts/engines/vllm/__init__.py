"""Sampling with vLLM in the trainer's process (docs/rollouts.md)."""
