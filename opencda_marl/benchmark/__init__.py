"""The benchmark: learners and controllers on the same held-out traffic, in cells that can be killed and typed again."""
