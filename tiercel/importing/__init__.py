"""Making recipes from the command lines of ms-swift, TRL and VLM-R1. Imports no torch."""
