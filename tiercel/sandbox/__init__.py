"""Processes that run the user's code."""
