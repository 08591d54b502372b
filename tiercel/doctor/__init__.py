"""Verdicts on a machine before a run depends on it. Only modules that run in a child process import torch."""
