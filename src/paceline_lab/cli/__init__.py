"""Commands, which entry points add to `paceline` and `paceline bench`: one module per command."""
