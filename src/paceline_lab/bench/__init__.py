"""Measurements and checks: interleaved A/B tests, records, cost plans, exactness.

A folder per command (`run`, `plan`, `verify`). They share `record.py`, the format of results;
`ab_test.py`, interleaved measurement; `journal.py`, resuming; `summary.py`, aggregates.
"""
