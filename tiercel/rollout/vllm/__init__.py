"""vLLM as an engine: in the processes of the ranks, or on servers."""
