"""Many cells: the matrix, its slots, simulator servers and trainer processes."""
