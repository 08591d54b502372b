"""Verdicts on a machine before a run depends on it. Nothing here imports torch but what runs in a child process."""
