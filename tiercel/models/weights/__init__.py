"""Weights from files and to files."""
