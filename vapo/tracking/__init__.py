"""Records runs in MLflow: a logger, a journal on disk, and delivery in the background."""
