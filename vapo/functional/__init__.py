"""Pure tensor math: tensors and numbers in, tensors out. No modules, config, logging or state."""
