"""Estimates of a run's memory and time, from nothing but a recipe and a config.json."""
