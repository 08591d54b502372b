"""Judgements on a recipe that look at more than one key or at files."""
