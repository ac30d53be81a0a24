"""`bench sweep`: prompt lengths, context depths and temperatures."""
