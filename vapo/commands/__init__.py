"""One module for each subcommand of `vapo`; each has `run(...)` and imports what it needs."""
