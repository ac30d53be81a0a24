"""Differences between operating systems: processes, locks, signals, limits of the machine."""
