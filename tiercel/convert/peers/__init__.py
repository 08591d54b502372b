"""Tables of the peers' flags: data files only."""
