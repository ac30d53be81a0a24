"""Commands, which entry points add to `paceline`."""
