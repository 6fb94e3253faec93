"""Sections of the page: which numbers each shows, as charts and as a table; a file per question."""
