"""Continuous batching: answers of many callers in the calls of one engine, without HTTP."""
