"""Any text model that mlx-lm loads, as an engine: Apple GPUs, and MLX's CPU build for tests."""
