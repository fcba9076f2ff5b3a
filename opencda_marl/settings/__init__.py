"""One frozen dataclass per thing that a person can set; defaults are written here and nowhere else."""
