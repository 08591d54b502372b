"""Hold the tables of the peers' flags; there are only data files here."""
