"""The machine: devices, the ranks of a run and sums over them, seeds, progress, installation."""
