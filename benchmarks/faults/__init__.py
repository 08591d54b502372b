"""Faults made on purpose, and whether tiercel keeps its promises under them."""
