"""Runs a model: `Model`, the streams of its answers, options and results."""
