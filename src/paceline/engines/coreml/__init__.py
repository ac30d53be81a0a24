"""The `coreml` engine: Core ML programs, on the Apple Neural Engine or in the rehearsal."""
