"""Open pictures and videos of rows."""
