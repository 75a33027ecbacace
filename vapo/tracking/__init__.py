"""Recording of runs in MLflow: a logger, a journal on disk, delivery in the background."""
