"""Names in a Core ML model folder that both the model list and the engines use."""

CORE_ML = "coreml-model"
"""Kind in its manifest."""
EMBEDDINGS = "embeddings.npy"
"""[vocab, hidden_size] float16."""
HEAD = "head.npy"
"""[vocab, hidden_size] float16; only if the head differs from the embeddings and has taps."""
