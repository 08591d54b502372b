"""Estimates of the memory and time of a run, from a recipe and a config.json alone."""
