"""Numbers gone bad, and the watchers of a run: docs/watching.md."""
