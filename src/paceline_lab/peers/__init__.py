"""`bench peers`: other runtimes and paceline on the same prompts, interleaved."""
