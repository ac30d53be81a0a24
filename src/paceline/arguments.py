"""What the commands take; what they do is in `cli.py`."""

import argparse
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

from paceline import __version__
from paceline.models.registry import DEFAULT_MODEL

SAMPLING = (
    ("temperature", float, "0 (default) is greedy"),
    ("top-k", int, "keep the k most likely tokens"),
    ("top-p", float, "keep the fewest tokens with this much probability"),
    ("min-p", float, "keep tokens this likely relative to the best"),
    ("repetition-penalty", float, "divide logits of tokens seen"),
    ("presence-penalty", float, "subtract from logits of tokens used"),
    ("frequency-penalty", float, "the same, for each time used"),
    ("seed", int, "the same seed gives the same tokens"),
)

Command = Callable[[Namespace], int]


class _Parser(ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")


def parser(commands: Mapping[str, Command]) -> ArgumentParser:
    """The whole command line; the function of the chosen command is `run` in what it parses."""
    top = _Parser(
        prog="paceline", description="Run language models here, faster by exact speculation."
    )
    top.add_argument("--version", action="version", version=f"paceline {__version__}")
    under = top.add_subparsers(required=True, metavar="command", parser_class=_Parser)

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

    _add_conversion(add("convert", "Convert a model to another form, once."))
    _add_core_ml(add, under)

    generate = add("generate", "Answer one prompt.")
    generate.add_argument("prompt", nargs="?", help="the prompt; - or nothing reads it from stdin")
    generate.add_argument("--file", type=Path, help="read the prompt from a file")
    generate.add_argument("--raw", action="store_true", help="no chat template")
    chat = add("chat", "Talk; earlier turns are not computed again.")
    for made in (generate, chat):
        made.add_argument("--system", help="a system message")
        _add_model(made)
        _add_answer(made)

    _add_serve(add("serve", "Serve a model over HTTP, as OpenAI's API has it."))
    _add_bench(add, under)
    _add_training(add, under)

    plan = add("plan", "What a call costs here by rows, and what drafting must bring.")
    plan.add_argument("--again", action="store_true", help="measure anew")
    _add_model(plan)
    return top


def _add_serve(serve: ArgumentParser) -> None:
    serve.add_argument("--host", default="127.0.0.1", help="address; others need --api-key")
    serve.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    serve.add_argument(
        "--api-key",
        action="append",
        help="requests must bring it; may be repeated; default: $PACELINE_API_KEY",
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
    serve.add_argument("--queue", type=_count, default=256, help="requests that may wait")
    serve.add_argument("--at-once", type=_count, default=64, help="answers that are written")
    serve.add_argument("--timeout", type=float, help="seconds an answer may take, waiting too")
    serve.add_argument("--grace", type=float, default=30.0, help="seconds for answers at the end")
    group = serve.add_argument_group("speculation, where a request does not say")
    group.add_argument("--drafter", default="auto", help="auto, none, or parts joined by +")
    group.add_argument("--policy", default="auto", help="auto, fixed, adaptive or kelly")
    group.add_argument("--max-block", type=int, help="most rows in a block, 2 to 32")
    _add_model(serve)


def _add_bench(add: Callable[..., ArgumentParser], under: Any) -> None:
    bench = under.add_parser("bench", help="Measure.", description="Measure.")
    within = bench.add_subparsers(required=True, metavar="command", parser_class=_Parser)
    run = add("bench run", "Compare drafters with plain decoding on a suite.", within)
    run.add_argument("--drafter", action="append", help="a contender; may be repeated")
    run.add_argument("--policy", default="auto")
    run.add_argument("--rounds", type=_count, default=3)
    run.add_argument("--kind", action="append", help="only this kind of prompt; may be repeated")
    run.add_argument("--per-kind", type=_count, help="only so many prompts of each kind")
    serve = add("bench serve", "Load a server, ours or another OpenAI-compatible one.", within)
    serve.add_argument("--url", default="http://127.0.0.1:8000/v1", help="its base URL")
    serve.add_argument("--model", help="default: the first that it has")
    serve.add_argument("--api-key", help="what it wants to see")
    serve.add_argument(
        "--clients", type=_count, action="append", help="who ask at once; may be repeated"
    )
    serve.add_argument(
        "--rate", type=float, action="append", help="requests a second; may be repeated"
    )
    serve.add_argument("--requests", type=_count, default=32, help="how many for each load")
    serve.add_argument("--kind", action="append", help="only this kind of prompt; may be repeated")
    serve.add_argument("--extra", default="{}", metavar="JSON", help="more fields of every request")
    verify = add("verify", "Check row invariance and token parity on this machine.")
    verify.add_argument(
        "--whole",
        action="store_true",
        help="every combination instead of a part that covers every pair",
    )
    verify.add_argument(
        "--drafter", action="append", help="check this one; may be repeated; default: all there are"
    )
    for made, tokens in ((run, 128), (serve, 128), (verify, 64)):
        made.add_argument("--suite", type=Path, help="JSON lines; default: paceline's own prompts")
        made.add_argument("--max-tokens", type=_count, default=tokens)
        made.add_argument("--output", type=Path, help="write the result as JSON, too")
    for made in (run, verify):
        _add_model(made)


def _add_conversion(convert: ArgumentParser) -> None:
    convert.add_argument("source", help="a folder, a hub name (owner/name); for Core ML any model")
    convert.add_argument("--to", choices=["openvino", "coreml"], default="openvino")
    convert.add_argument(
        "--weights", choices=["int8", "int4", "f16", "int8-per-tensor"], default="int8"
    )
    convert.add_argument(
        "--output", dest="folder", type=Path, help="a folder to make; default: the cache"
    )
    group = convert.add_argument_group("Core ML")
    group.add_argument("--rows", type=_count, help="most rows of a call; default 4")
    group.add_argument(
        "--functions", type=_numbers, metavar="T,T", help="static functions for these rows"
    )
    group.add_argument("--slots", type=_count, help="longest text; default 2048, or all there is")
    group.add_argument("--topology", help="layers of each package, as 20+4+6+2")
    group.add_argument("--megabytes", type=_count, help="largest package of layers; default 1500")
    group.add_argument("--head-rows", type=_count, help="most tokens in a package of the head")
    group.add_argument("--taps", type=_taps, metavar="N,N", help="layers to tap, or all")
    group.add_argument(
        "--keep", action="append", metavar="PATTERN", help="weights that stay f16; may be repeated"
    )
    group.add_argument("--routing", help="of experts, where a family has a choice; see the guide")
    group.add_argument("--temporary", type=Path, help="a folder for what is half made")


def _add_core_ml(add: Callable[..., ArgumentParser], under: Any) -> None:
    about = "Check Core ML models."
    within = under.add_parser("coreml", help=about, description=about).add_subparsers(
        required=True, metavar="command", parser_class=_Parser
    )
    lint = add("coreml lint", "What would leave the Neural Engine, or fail there.", within)
    golden = add("coreml golden", "Compare a model with itself and with transformers.", within)
    golden.add_argument("--source", help="what it was made from; default: what its manifest says")
    golden.add_argument("--tokens", type=_count, default=32, help="how long the text is")
    golden.add_argument("--threshold", type=float, default=0.99, help="least cosine")
    golden.add_argument(
        "--rounding", choices=["f16", "f32"], default="f16", help="of the rehearsal, off a Mac"
    )
    golden.add_argument("--temporary", type=Path, help="a folder for what is fetched")
    residency = add("coreml residency", "Where its operations run, on a Mac.", within)
    residency.add_argument("--units", default="cpu-and-ne", help="compute units")
    residency.add_argument(
        "--recorded", type=Path, metavar="FILE", help="judge a plan that was recorded on a Mac"
    )
    residency.add_argument("--record", type=Path, metavar="FILE", help="keep the plan")
    for made in (lint, golden, residency):
        made.add_argument("artifact", help="a folder that convert made, or NAME@coreml")


def _add_training(add: Callable[..., ArgumentParser], under: Any) -> None:
    about = "Train a drafter for a target."
    train = under.add_parser("train", help=about, description=about)
    within = train.add_subparsers(required=True, metavar="command", parser_class=_Parser)
    prompts = add("train prompts", "Let the target make up prompts.", within)
    prompts.add_argument("--count", type=_count, default=1000)
    prompts.add_argument("--temperature", type=float, default=0.9)
    answers = add("train answers", "Let the target answer prompts.", within)
    answers.add_argument("--max-tokens", type=_count, default=256)
    answers.add_argument(
        "--temperature", type=float, action="append", help="repeated: they take turns; default 0"
    )
    for made in (prompts, answers):
        made.add_argument("--seed", type=int, default=0)
        made.add_argument("--at-once", type=_count, default=32, help="sequences in a call")
        made.add_argument("--threads", type=int)
    answers.add_argument("--prompts", type=Path, nargs="+", action="extend", required=True)
    table = add("train table", "Count a table of what the target usually says.", within)
    dflash = add("train dflash", "Train a block-diffusion drafter (needs the extra train).", within)
    for made in (table, dflash):
        made.add_argument(
            "--data", type=Path, nargs="+", action="extend", help="folders of answers"
        )
        made.add_argument(
            "--prompts",
            type=Path,
            nargs="+",
            action="extend",
            help="make the answers first, in OUT/answers",
        )
    dflash.add_argument("--layers", type=_count, default=1)
    dflash.add_argument("--block", type=_count, default=8, help="rows: the last token and drafts")
    dflash.add_argument("--taps", type=_count, default=3, help="layers of the target to look at")
    dflash.add_argument("--vocab", type=_count, help="draft only the most frequent tokens")
    dflash.add_argument("--steps", type=_count, default=30_000)
    dflash.add_argument("--texts", type=_count, default=4, help="texts in a step")
    dflash.add_argument("--anchors", type=_count, default=8, help="blocks of a text in a step")
    dflash.add_argument("--gamma", type=float, default=2.0, help="places that learning looks ahead")
    dflash.add_argument("--rate", type=float, default=1e-3, help="learning rate at its highest")
    dflash.add_argument("--evaluate-every", type=_count, default=1000, help="steps")
    dflash.add_argument("--seed", type=int, default=0)
    dflash.add_argument("--device", default="cpu", help="cpu or cuda")
    table.add_argument("--megabytes", type=float, default=16.0, help="how big it may get")
    folder = "the folder to make"
    outputs = ((prompts, "the file to write"), (answers, folder), (table, folder), (dflash, folder))
    for made, what in outputs:
        made.add_argument("--out", type=Path, required=True, help=what)
        made.add_argument("--target", default=DEFAULT_MODEL, help="name, path or hub name")


def _add_model(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("model")
    group.add_argument("--model", default=DEFAULT_MODEL, help="name, path or hub name")
    group.add_argument("--engine", help="openvino or coreml; default: the one the model is for")
    group.add_argument("--rows", type=int, default=2, help="least rows a call: 2 is exact, 1 not")
    group.add_argument("--cache-tokens", type=int, help="slots for keys and values")
    group.add_argument("--threads", type=int)


def _add_answer(parser: ArgumentParser) -> None:
    group = parser.add_argument_group("answer")
    group.add_argument("--max-tokens", type=int, help="default: up to the context limit")
    for name, kind, about in SAMPLING:
        group.add_argument(f"--{name}", type=kind, help=about)
    group.add_argument("--logit-bias", type=_bias, action="append", metavar="TOKEN=BIAS")
    group.add_argument("--stop", action="append", help="a string that ends the answer")
    group.add_argument("--ignore-eos", action="store_true", help="go on after the end token")
    group = parser.add_argument_group("speculation")
    group.add_argument("--drafter", help="auto, none, or parts joined by +: see the guide")
    group.add_argument("--policy", help="auto, fixed, adaptive or kelly")
    group.add_argument("--max-block", type=int, help="most rows in a block, 2 to 32")
    group.add_argument("--probe", metavar="DRAFTER", help="count what a drafter would have done")


def _count(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not numbers, as in 1,4") from None


def _taps(text: str) -> tuple[int, ...] | str:
    return "all" if text == "all" else _numbers(text)


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not TOKEN=BIAS, as in 42=-5") from None
