"""What the commands take; what they do is in `cli.py`, `lab.py` and `workshops.py`."""

import json
from argparse import ArgumentParser, ArgumentTypeError, BooleanOptionalAction, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from paceline import __version__
from paceline.cli.arguments.lab import add_bench
from paceline.cli.arguments.numbers import (
    BLOCK,
    COUNT,
    PENALTY,
    PORT,
    PROBABILITY,
    SECONDS,
    SEED,
    TEMPERATURE,
    TIMEOUT,
    Bias,
    Limit,
    Real,
    Whole,
)
from paceline.cli.arguments.shared import Parser, add_model
from paceline.cli.arguments.workshops import add_conversion, add_core_ml, add_training
from paceline.models.registry import DEFAULT_MODEL

SAMPLING = (
    ("temperature", TEMPERATURE, "0 is greedy; default, as for the next four: as the model has it"),
    ("top-k", Whole(0), "keep the k most likely tokens"),
    ("top-p", Real(0, 1, open=True), "keep the fewest tokens with this much probability"),
    ("min-p", PROBABILITY, "keep tokens this likely relative to the best"),
    ("repetition-penalty", Real(0, 100, open=True), "divide logits of tokens seen"),
    ("presence-penalty", PENALTY, "subtract from logits of tokens used"),
    ("frequency-penalty", PENALTY, "the same, for each time used"),
    ("seed", SEED, "the same seed gives the same tokens"),
)

MAX_TOKENS = 2048
"""Tokens after which an answer of `generate` and `chat` ends, unless the user says otherwise."""

Command = Callable[[Namespace], int]


def parser(commands: Mapping[str, Command]) -> ArgumentParser:
    """The whole command line; the function of the chosen command is `run` in what it parses."""
    top = Parser(
        prog="paceline", description="Run language models here, faster by exact speculation."
    )
    top.add_argument("--version", action="version", version=f"paceline {__version__}")
    under = top.add_subparsers(required=True, metavar="command", parser_class=Parser)

    def add(name: str, about: str, within: Any = under) -> ArgumentParser:
        word = name.rpartition(" ")[2]
        made: ArgumentParser = within.add_parser(word, help=about, description=about)
        made.set_defaults(run=commands[name])
        made.add_argument("--json", action="store_true", help="print JSON")
        made.add_argument("--quiet", action="store_true", help="no progress, no statistics")
        return made

    pull = add("pull", "Fetch a model, or bring it up to date.")
    pull.add_argument("model", nargs="?", default=DEFAULT_MODEL)

    models = add("models", "List the models that are here or have a short name.")
    models.add_argument("--check", action="store_true", help="compare every file's checksum")

    add_conversion(add("convert", "Convert a model to another form, once."))
    add_core_ml(add, under)

    generate = add("generate", "Answer one prompt.")
    generate.add_argument("prompt", nargs="?", help="the prompt; - or nothing reads it from stdin")
    generate.add_argument("--file", type=Path, help="read the prompt from a file")
    generate.add_argument("--raw", action="store_true", help="no chat template")
    generate.add_argument(
        "--prediction", type=Path, metavar="FILE", help="text that the answer has much of"
    )
    generate.add_argument(
        "--trace", type=Path, metavar="FILE", help="write a line for each step, for bench trace"
    )
    chat = add("chat", "Talk; of the earlier turns, only the last answer is read again.")
    chat.add_argument(
        "--drop-oldest",
        action="store_true",
        help="when the context is full, drop the oldest turns and go on, without asking",
    )
    for made in (generate, chat):
        made.add_argument("--system", help="a system message")
        made.add_argument("--tint", action="store_true", help="mark what was guessed and stood")
        add_model(made)
        _add_answer(made)

    _add_serve(add("serve", "Serve a model over HTTP, as OpenAI's API has it."))
    add_bench(add, under)
    add_training(add, under)

    plan = add("plan", "What a call costs here by rows, and what drafting must bring.")
    plan.add_argument("--again", action="store_true", help="measure anew")
    plan.add_argument("--output", type=Path, help="write the result as JSON, too")
    add_model(plan)
    return top


def _add_serve(serve: ArgumentParser) -> None:
    serve.add_argument("--host", default="127.0.0.1", help="address; others need --api-key")
    serve.add_argument("--port", type=PORT, default=8000, help="0 takes a free one")
    serve.add_argument(
        "--api-key",
        action="append",
        help="requests must bring it; may be repeated; default: $PACELINE_API_KEY",
    )
    serve.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="keys, one a line; # begins a comment"
    )
    serve.add_argument("--anyone", action="store_true", help="no key, although others may ask")
    serve.add_argument("--name", help="what the model is called; default: its own name")
    serve.add_argument("--alias", action="append", help="another name for it; may be repeated")
    serve.add_argument(
        "--allow-host", action="append", metavar="HOST", help="what Host may say; may be repeated"
    )
    serve.add_argument(
        "--origin", action="append", help="a web page's scheme://host:port that may ask"
    )
    serve.add_argument("--queue", type=COUNT, default=256, help="requests that may wait")
    serve.add_argument("--at-once", type=COUNT, default=64, help="answers that are written")
    serve.add_argument("--timeout", type=TIMEOUT, help="seconds an answer may take, waiting too")
    serve.add_argument("--grace", type=SECONDS, default=30.0, help="seconds for answers at the end")
    group = serve.add_argument_group("speculation, where a request does not say")
    group.add_argument("--drafter", default="auto", help="auto, none, or parts joined by +")
    group.add_argument("--policy", default="auto", help="auto, fixed, adaptive or kelly")
    group.add_argument("--max-block", type=BLOCK, help="most rows in a block, 2 to 32")
    _add_generation_config(serve.add_argument_group("sampling, where a request does not say"))
    add_model(serve)


def _add_answer(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("answer")
    group.add_argument(
        "--max-tokens",
        type=Limit(),
        help=f"most tokens of an answer; -1: until the context is full; default: {MAX_TOKENS}",
    )
    group.add_argument(
        "--repetition-detection",
        action=BooleanOptionalAction,
        help="stop an answer that goes round in circles; default: unless --ignore-eos",
    )
    _add_generation_config(group)
    for name, kind, about in SAMPLING:
        group.add_argument(f"--{name}", type=kind, help=about)
    group.add_argument("--logit-bias", type=Bias(), action="append", metavar="TOKEN=BIAS")
    group.add_argument("--stop", action="append", help="a string that ends the answer")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end token")
    group.add_argument(
        "--think",
        action=BooleanOptionalAction,
        help="turn a model's thinking on or off; default: as its chat template has it",
    )
    group.add_argument(
        "--chat-template-kwargs",
        type=variables,
        metavar="JSON",
        help="variables for the chat template, as an object",
    )
    group = parser.add_argument_group("speculation")
    group.add_argument("--drafter", help="auto, none, or parts joined by +: see the guide")
    group.add_argument("--policy", help="auto, fixed, adaptive or kelly")
    group.add_argument("--max-block", type=BLOCK, help="most rows in a block, 2 to 32")
    group.add_argument("--probe", metavar="DRAFTER", help="count what a drafter would have done")


def variables(text: str) -> dict[str, Any]:
    """A JSON object. Raises ArgumentTypeError for any other text."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ArgumentTypeError(f"{text[:40]!r} is not a JSON object")
    return value


def _add_generation_config(group: Any) -> None:
    group.add_argument(
        "--generation-config",
        choices=("auto", "none"),
        default="auto",
        help="none: not the sampling settings that the model comes with; default: auto",
    )
