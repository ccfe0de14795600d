"""How well models predict and remember, one probe a file. Rows have the same keys for every probe."""
