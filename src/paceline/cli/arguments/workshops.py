"""The arguments of the workshops: convert, coreml, train."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from paceline.cli.arguments.numbers import (
    COUNT,
    PROBABILITY,
    SEED,
    TEMPERATURE,
    THREADS,
    Real,
    Whole,
    Wholes,
)
from paceline.cli.arguments.shared import COMPUTE_UNITS, Add, Parser
from paceline.models.registry import DEFAULT_MODEL


def add_conversion(convert: ArgumentParser) -> None:
    """The command `convert`."""
    convert.add_argument("source", help="a folder, a hub name (owner/name); for Core ML any model")
    convert.add_argument("--to", choices=["openvino", "coreml"], default="openvino")
    convert.add_argument(
        "--weights", choices=["int8", "int4", "f16", "int8-per-tensor"], default="int8"
    )
    convert.add_argument(
        "--output", dest="folder", type=Path, help="a folder to make; default: the cache"
    )
    group = convert.add_argument_group("Core ML")
    group.add_argument("--rows", type=COUNT, help="most rows of a call; default 4")
    group.add_argument(
        "--functions", type=Wholes(Whole(1)), metavar="T,T", help="static functions for these rows"
    )
    group.add_argument("--slots", type=COUNT, help="longest text; default 2048, or all there is")
    group.add_argument("--topology", help="layers of each package, as 20+4+6+2")
    group.add_argument("--megabytes", type=COUNT, help="largest package of layers; default 1500")
    group.add_argument("--head-rows", type=COUNT, help="most tokens in a package of the head")
    group.add_argument(
        "--taps", type=Wholes(Whole(0), "all"), metavar="N,N", help="layers to tap, or all"
    )
    group.add_argument(
        "--keep", action="append", metavar="PATTERN", help="weights that stay f16; may be repeated"
    )
    group.add_argument("--routing", help="of experts, where a family has a choice; see the guide")
    group.add_argument("--temporary", type=Path, help="a folder for what is half made")


def add_core_ml(add: Add, under: Any) -> None:
    """The commands `coreml ...`."""
    about = "Check Core ML models."
    within = under.add_parser("coreml", help=about, description=about).add_subparsers(
        required=True, metavar="command", parser_class=Parser
    )
    lint = add("coreml lint", "What would leave the Neural Engine, or fail there.", within)
    golden = add("coreml golden", "Compare a model with itself and with transformers.", within)
    golden.add_argument("--source", help="what it was made from; default: what its manifest says")
    golden.add_argument("--tokens", type=COUNT, default=32, help="how long the text is")
    golden.add_argument("--threshold", type=PROBABILITY, default=0.99, help="least cosine")
    golden.add_argument(
        "--rounding", choices=["f16", "f32"], default="f16", help="of the rehearsal, off a Mac"
    )
    golden.add_argument("--temporary", type=Path, help="a folder for what is fetched")
    residency = add("coreml residency", "Where its operations run, on a Mac.", within)
    residency.add_argument(
        "--units", choices=COMPUTE_UNITS, default="cpu-and-ne", help="compute units"
    )
    residency.add_argument(
        "--recorded", type=Path, metavar="FILE", help="judge a plan that was recorded on a Mac"
    )
    residency.add_argument("--record", type=Path, metavar="FILE", help="keep the plan")
    for made in (lint, golden, residency):
        made.add_argument("artifact", help="a folder that convert made, or NAME@coreml")


def add_training(add: Add, under: Any) -> None:
    """The commands `train ...`."""
    about = "Train a drafter for a target."
    train = under.add_parser("train", help=about, description=about)
    within = train.add_subparsers(required=True, metavar="command", parser_class=Parser)
    prompts = add("train prompts", "Let the target make up prompts.", within)
    prompts.add_argument("--count", type=COUNT, default=1000)
    prompts.add_argument("--temperature", type=TEMPERATURE, default=0.9)
    answers = add("train answers", "Let the target answer prompts.", within)
    answers.add_argument("--max-tokens", type=COUNT, default=256)
    answers.add_argument(
        "--temperature",
        type=TEMPERATURE,
        action="append",
        help="repeated: they take turns; default 0",
    )
    for made in (prompts, answers):
        made.add_argument("--seed", type=SEED, default=0)
        made.add_argument("--at-once", type=COUNT, default=32, help="sequences in a call")
        made.add_argument("--threads", type=THREADS)
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
    dflash.add_argument("--layers", type=COUNT, default=1)
    dflash.add_argument("--block", type=COUNT, default=8, help="rows: the last token and drafts")
    dflash.add_argument("--taps", type=COUNT, default=3, help="layers of the target to look at")
    dflash.add_argument("--vocab", type=COUNT, help="draft only the most frequent tokens")
    dflash.add_argument("--steps", type=COUNT, default=30_000)
    dflash.add_argument("--texts", type=COUNT, default=4, help="texts in a step")
    dflash.add_argument("--anchors", type=COUNT, default=8, help="blocks of a text in a step")
    dflash.add_argument(
        "--gamma",
        type=Real(0, 1e6, open=True),
        default=2.0,
        help="places that learning looks ahead",
    )
    dflash.add_argument(
        "--rate", type=Real(0, 1, open=True), default=1e-3, help="learning rate at its highest"
    )
    dflash.add_argument("--evaluate-every", type=COUNT, default=1000, help="steps")
    dflash.add_argument("--seed", type=SEED, default=0)
    dflash.add_argument("--device", default="cpu", help="cpu or cuda")
    table.add_argument(
        "--megabytes", type=Real(0, 1e6, open=True), default=16.0, help="how big it may get"
    )
    folder = "the folder to make"
    outputs = ((prompts, "the file to write"), (answers, folder), (table, folder), (dflash, folder))
    for made, what in outputs:
        made.add_argument("--out", type=Path, required=True, help=what)
        made.add_argument("--target", default=DEFAULT_MODEL, help="name, path or hub name")
