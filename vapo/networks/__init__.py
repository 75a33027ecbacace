"""Actor and critic: architecture, weights, adapters, forward passes."""
