"""Makes many runs with one command: a grid of rows, each with several seeds, each its own
process.
"""
