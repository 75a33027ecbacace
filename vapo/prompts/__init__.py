"""Prompts: reads sources, mixes them, applies templates, and chooses an iteration's prompts."""
