"""From a record of any format to a draft of a row."""
