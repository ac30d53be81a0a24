"""What the arguments of several commands are made of."""

from argparse import ArgumentParser
from collections.abc import Callable
from typing import NoReturn

from paceline.cli.arguments.numbers import COUNT, THREADS, Whole
from paceline.models.registry import DEFAULT_MODEL

COMPUTE_UNITS = ("all", "cpu-only", "cpu-and-gpu", "cpu-and-ne")
"""As `paceline.engines.base` has them, which imports numpy."""

Add = Callable[..., ArgumentParser]
"""(name, about, within) -> the parser of a command."""


class Parser(ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        """End with exit code 2."""
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def add_model(parser: ArgumentParser) -> None:
    """Which model, and how it is run."""
    group = parser.add_argument_group("model")
    group.add_argument("--model", default=DEFAULT_MODEL, help="name, path or hub name")
    group.add_argument("--engine", help="openvino, coreml or mlx; default: as the model needs")
    group.add_argument(
        "--rows", type=Whole(1, 2), default=2, help="least rows a call: 2 is exact, 1 not"
    )
    cache = "KV cache, in tokens; default: one context, of serve 4"
    group.add_argument("--cache-tokens", type=COUNT, help=cache)
    group.add_argument("--threads", type=THREADS)
    group.add_argument(
        "--compute-units", choices=COMPUTE_UNITS, help="of the engine coreml; default: cpu-and-ne"
    )
