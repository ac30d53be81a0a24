"""The decoding algorithm: logits in, tokens out; no engine, no clock, no I/O.

Start with `generation.py`, the state machine; `types.py` has the types that it exchanges.
"""
