"""Bundled crossings: plain SUMO XML, and the network and OpenDRIVE files that netconvert makes of it."""
