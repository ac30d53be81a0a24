"""Constraints on what an answer may be: grammars, JSON schemas, tool calls."""
