"""Answers that go round in circles: any drafter is fast on them, and no user wants them.

The definition, used everywhere a loop is counted: an answer of n tokens has n - 7 8-grams, one for
each place where eight consecutive tokens begin. Its repeated share is the share of these that equal
an 8-gram which began earlier in the same answer. An answer is a loop when that share is over 0.3.
Answers of fewer than eight tokens have no 8-gram, and a share of 0. Prompts do not count: to quote
one is no loop.
"""

from collections.abc import Sequence

GRAM = 8
MOST_REPEATED = 0.3


def repeated_share(tokens: Sequence[int]) -> float:
    """The share of an answer's 8-grams that it had before, 0 to 1."""
    grams = [tuple(tokens[at : at + GRAM]) for at in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


def is_loop(tokens: Sequence[int]) -> bool:
    """Whether over 30 % of an answer's 8-grams are ones that it had before."""
    return repeated_share(tokens) > MOST_REPEATED
