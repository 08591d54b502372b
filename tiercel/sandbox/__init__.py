"""Run the user's code in separate processes."""
