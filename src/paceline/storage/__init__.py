"""Files: atomic writes, checksums, validation, artifact manifests, journals."""
