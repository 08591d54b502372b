"""`tiercel view`: a page of runs that follows them, served to this machine alone. Imports no torch."""
