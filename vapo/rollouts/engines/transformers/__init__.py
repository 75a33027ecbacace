"""Sampling with Transformers, in the trainer's process."""
