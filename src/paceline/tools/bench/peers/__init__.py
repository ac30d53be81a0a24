"""Other runtimes on the same prompts, in turns with ours: one file for each.

Each file knows one runtime and how its own documentation sets it up, and imports it when it is
opened. `command.py` lets them answer and says what came out.
"""
