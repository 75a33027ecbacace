"""Studies on top of the core: what a setting can show, what critics learn, what a run needs."""
