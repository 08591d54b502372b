"""Detecting what is wrong with a run, and reporting it in one message."""
