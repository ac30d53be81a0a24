"""The chain of one layer; see `paceline_mlx.heads`."""
