"""Which effects of the ablation a setting can show, behind `vapo gates`."""
