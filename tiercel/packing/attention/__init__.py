"""Attention of packed rows."""
