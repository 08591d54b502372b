"""Learning from the answers in the rows: SFT, preferences, distillation from rows, reward models."""
