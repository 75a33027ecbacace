"""What recorded runs come to: the table with intervals, and the figures."""
