"""Measurements of models: interleaved A/B tests and their records.

`run.py` and `compare.py` are commands. `record.py` has the format of results, `ab_test.py`
interleaved measurement, `turns.py` the turns of a suite, `journal.py` resuming, `summary.py`
aggregates and tables.
"""
