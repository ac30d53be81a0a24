"""Commands that entry points add to `paceline`."""
