"""What is on disk: manifests, JSON lines, checksums, atomic writes."""
