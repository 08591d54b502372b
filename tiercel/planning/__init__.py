"""Memory and time of a run before it costs either, from a recipe and a config.json."""
