"""Tool calls: the formats of model families, a reader and a writer."""
