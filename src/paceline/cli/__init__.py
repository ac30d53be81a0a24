"""The command line: one module per command, with its options, its work and its output."""
