"""Types and rules that every other room shares. NumPy and the standard library only."""
