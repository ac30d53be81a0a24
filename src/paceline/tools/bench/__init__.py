"""Measuring: the prompt suite, paired runs, checks of exactness, what speculation would pay."""
