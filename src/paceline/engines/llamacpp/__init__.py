"""Runs GGUF files unchanged, through the C API of llama.cpp or ik_llama.cpp."""
