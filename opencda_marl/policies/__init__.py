"""Trained policies that come with the package, each a folder in the form of a checkpoint, and how a run becomes one."""
