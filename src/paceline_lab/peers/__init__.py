"""`bench peers`: other runtimes and paceline on the same prompts, interleaved.

A file per runtime: it sets the runtime up as its own documentation does, and imports it only when
it is opened.
"""
