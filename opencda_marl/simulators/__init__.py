"""Backends behind `core.simulator.Simulator`, and the demand they share."""
