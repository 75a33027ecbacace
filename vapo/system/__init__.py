"""The machine: processes, devices, sharding, seeds, progress, times."""
