"""`bench peers`: other runtimes and paceline on the same prompts, interleaved.

A file for each kind of peer: it is set up as its own documentation has it.
"""
