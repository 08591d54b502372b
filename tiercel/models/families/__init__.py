"""One class for each architecture."""
