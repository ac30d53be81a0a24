"""Many users of one loaded model: a scheduler that shares its calls, and an HTTP server over it."""
