"""Detection of what is wrong with a run, and one message that reports it."""
