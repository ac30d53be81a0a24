"""The command line: one module a command, with its options, its call and what it prints."""
