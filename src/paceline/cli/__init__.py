"""The command line: one module per command, with its options, logic and output."""
