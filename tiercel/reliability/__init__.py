"""Keeping a run going, or saying in one message what is wrong with it."""
