"""Make recipes from the command lines of ms-swift, TRL, VLM-R1, LLaMA-Factory, EasyR1 and verl. Imports no torch."""
