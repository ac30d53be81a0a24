"""Trains a drafter for a target: prompts, the target's answers to them, and the training itself.

Only the `paceline train` commands import it. `mtp` needs torch (the extra `train`).
"""
