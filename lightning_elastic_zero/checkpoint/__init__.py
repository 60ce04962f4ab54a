"""Save and load of a live state: all checks first, then the commit."""
