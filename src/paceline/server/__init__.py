"""The HTTP server: the API of one or several loaded models, for many clients."""
