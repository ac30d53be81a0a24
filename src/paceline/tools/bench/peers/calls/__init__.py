"""`bench peers --calls`: what calls, prompts and starting cost in each runtime, on one GGUF file.

A process per runtime, so that memory and start are its own. All processes wait while one is asked.
"""
