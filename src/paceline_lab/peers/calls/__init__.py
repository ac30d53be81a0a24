"""`bench peers --calls`: costs of calls, prompts and starting by runtime, on one GGUF file.

A process per runtime, so that memory and start are its own. All processes wait while one is asked.
"""
