"""Demos of the repository that the package does not have: `tiercel demo --pairs` and `tiercel demo --zoom`."""
