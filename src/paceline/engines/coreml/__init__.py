"""The `coreml` engine: models as Core ML programs, run on the Apple Neural Engine or in a simulation, the rehearsal."""
