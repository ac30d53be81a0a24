"""Commands, which entry points add to `paceline` and `paceline bench`: a module per command."""
