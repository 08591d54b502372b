"""What a run has trained: its weights, its completions and scores, and their export. The commands `eval`, `predict` and
`export` use it, and so do the functions of `tiercel.api`."""
