"""Files that are whole or missing, and rows of data that are read with limits."""
