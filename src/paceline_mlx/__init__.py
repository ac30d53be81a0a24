"""Engine for text models that mlx-lm loads: on Apple GPUs, or MLX's CPU build for tests."""
