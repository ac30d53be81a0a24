"""Measurements of models: interleaved A/B tests and their records.

`record.py` has the format of results, `ab_test.py` interleaved measurement, `turns.py` the turns of
a suite, `journal.py` resuming, `summary.py` aggregates and tables, `compare.py` the comparison of
two results.
"""
