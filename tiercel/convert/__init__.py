"""Making recipes from the command lines of ms-swift, TRL, VLM-R1 and LLaMA-Factory. Imports no torch."""
