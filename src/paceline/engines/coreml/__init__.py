"""The `coreml` engine: models as Core ML programs, run by the Apple Neural Engine or rehearsed."""
