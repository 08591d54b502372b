"""Checks of a recipe that need more than one key, or that look at files."""
