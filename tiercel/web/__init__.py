"""Pages: the report of one run, and the page that follows runs."""
