"""`bench peers`: other runtimes and paceline on the same prompts, interleaved.

One file per kind of peer, which is configured as its own documentation recommends.
"""
