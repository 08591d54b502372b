"""What a run has trained: its weights, completions and scores by them, and their export. The commands `eval`, `predict`
and `export` and the functions of Python use it."""
