"""Makes the report on recorded runs: a table with intervals, and figures."""
