"""Multi-model router: one port, one subprocess per model, loaded on first request."""
