"""The machine: devices, the ranks of a run and their sums, seeds, progress, installation."""
