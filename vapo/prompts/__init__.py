"""Prompts: sources, rows, mixtures, curricula, procedural tasks."""
