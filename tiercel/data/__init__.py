"""Read rows and images from the user's files and encode them, step by step, in a reproducible order."""
