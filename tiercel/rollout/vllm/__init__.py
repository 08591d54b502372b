"""vLLM as an engine: in the processes of the ranks, and by servers."""
