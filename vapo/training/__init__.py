"""Training: iterations, minibatches, losses, updates."""
