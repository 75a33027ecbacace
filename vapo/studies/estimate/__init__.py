"""What a config needs, behind `vapo estimate`: memory by arithmetic, a simulated step, hours."""
