"""Convert records of any format to drafts of rows."""
