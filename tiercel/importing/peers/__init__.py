"""Tables of the peers' flags: data only."""
