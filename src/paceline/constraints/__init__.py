"""Constrained decoding: grammars, JSON schemas, tool calls."""
