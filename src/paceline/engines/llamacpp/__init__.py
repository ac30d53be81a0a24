"""Runs GGUF files as they are, by the C API of llama.cpp's family of libraries."""
