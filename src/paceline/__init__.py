"""paceline: speculative decoding for local language models that never changes a token."""

__version__ = "0.1.0"
