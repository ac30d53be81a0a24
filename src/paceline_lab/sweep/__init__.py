"""`bench sweep`: prompt lengths and context depths."""
