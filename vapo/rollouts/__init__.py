"""Rollouts: prompts in, scored responses out, as one batch an iteration."""
