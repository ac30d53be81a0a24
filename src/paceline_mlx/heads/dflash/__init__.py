"""The block-diffusion drafter; see `paceline_mlx.heads`."""
