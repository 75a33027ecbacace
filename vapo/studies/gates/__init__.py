"""Decides which effects of the ablation a setting can show, for `vapo gates`."""
