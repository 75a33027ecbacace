"""The memory that a config needs, behind `vapo estimate`."""
