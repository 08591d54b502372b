"""Pictures and videos of rows."""
