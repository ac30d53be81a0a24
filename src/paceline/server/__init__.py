"""The HTTP server: the API of one loaded model, or of several, for many clients."""
