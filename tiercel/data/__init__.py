"""Rows and images: from the user's files to encoded steps in a reproducible order."""
