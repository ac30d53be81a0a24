"""Measurements of models: interleaved A/B tests and their records."""
