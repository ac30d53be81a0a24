"""Continuous batching: many callers' answers in the forward passes of one engine, without HTTP."""
