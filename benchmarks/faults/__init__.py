"""Faults made on purpose, and whether tiercel does what it promises under them."""
