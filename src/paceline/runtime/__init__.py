"""Runs a model: `Model`, the streams of its answers, options, results and traces."""
