"""Tools for those who make and measure models: benchmarks, Core ML, training."""
