"""The algorithm: numpy in, tokens out; no engine, no clock, no I/O.

Start with `generation.py`, the state machine; `types.py` has the words it speaks with.
"""
