"""Benchmarks: interleaved A/B tests, load, simulation, checks of exactness, cost plans.

A folder per command (`run`, `sweep`, `serve`, ...). They share `record.py`, the format of results;
`ab_test.py`, interleaved measurement; `journal.py`, resuming; `summary.py`, aggregates.
"""
