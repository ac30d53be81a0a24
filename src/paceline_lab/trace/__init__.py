"""`bench trace`: what happened in one request, step by step, as `generate --trace` wrote it."""
