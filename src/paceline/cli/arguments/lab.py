"""The arguments of what measures and checks: bench, verify, plan."""

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from paceline.cli.arguments.numbers import BLOCK, COUNT, RATE, SEED, TEMPERATURE, Place
from paceline.cli.arguments.shared import Add, Parser, add_model

_SUITE = "JSON lines, Spec-Bench's question.jsonl too; default: paceline's own prompts"


def add_bench(add: Add, under: Any) -> None:
    """The commands `bench ...` and `verify`."""
    bench = under.add_parser("bench", help="Measure.", description="Measure.")
    within = bench.add_subparsers(required=True, metavar="command", parser_class=Parser)
    run = add("bench run", "Compare drafters with plain decoding on a suite.", within)
    run.add_argument("--drafter", action="append", help="a contender; may be repeated")
    run.add_argument("--policy", default="auto")
    run.add_argument("--rounds", type=COUNT, default=3)
    run.add_argument("--kind", action="append", help="only this kind of prompt; may be repeated")
    run.add_argument("--per-kind", type=COUNT, help="only N prompts of each kind")
    run.add_argument(
        "--limit",
        type=COUNT,
        metavar="N",
        help="only N prompts: the same number of each kind, spread evenly over the file",
    )
    sweep = add("bench sweep", "Compare by prompt length, or by context depth, and more.", within)
    _add_sweep(sweep)
    compare = add("bench compare", "Lay recorded results side by side.", within)
    compare.add_argument("results", type=Path, nargs="+", metavar="FILE", help="JSON of bench ...")
    compare.add_argument("--measure", default="ratio", help="what is compared; default: ratio")
    compare.add_argument(
        "--anyway", action="store_true", help="also with another model or other prompts"
    )
    report = add("bench report", "Draw recorded results: charts, and a page with them.", within)
    report.add_argument(
        "results", type=Path, nargs="+", metavar="FILE", help="JSON of bench ..., or of plan"
    )
    report.add_argument(
        "--output", type=Path, required=True, help="a folder for page and pictures, or one .html"
    )
    simulate = add("bench simulate", "Answer known texts again, without their model.", within)
    _add_simulate(simulate)
    trace = add("bench trace", "Show what generate --trace wrote.", within)
    trace.add_argument("trace", type=Path, metavar="FILE")
    trace.add_argument("--output", type=Path, metavar="FILE", help="draw it: a .png or an .html")
    peers = add("bench peers", "Compare with other runtimes, and with servers.", within)
    _add_peers(peers)
    serve = add("bench serve", "Load a server, ours or another OpenAI-compatible one.", within)
    serve.add_argument("--url", default="http://127.0.0.1:8000/v1", help="its base URL")
    serve.add_argument("--model", help="default: the first that it has")
    serve.add_argument("--api-key", help="what it wants to see")
    serve.add_argument(
        "--clients", type=COUNT, action="append", help="who ask at once; may be repeated"
    )
    serve.add_argument(
        "--rate", type=RATE, action="append", help="requests a second; may be repeated"
    )
    serve.add_argument("--requests", type=COUNT, default=32, help="how many for each load")
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
    answering = ((run, 128), (sweep, 80), (simulate, 128), (peers, 128), (serve, 128), (verify, 64))
    for made, tokens in answering:
        made.add_argument("--suite", type=Path, help=_SUITE)
        made.add_argument("--max-tokens", type=COUNT, default=tokens)
        made.add_argument("--output", type=Path, help="write the result as JSON, too")
    for made in (run, sweep, simulate, peers, verify):
        add_model(made)


def _add_sweep(sweep: ArgumentParser) -> None:
    group = sweep.add_argument_group("what is asked; each may be repeated")
    group.add_argument(
        "--length",
        type=Place(1),
        action="append",
        metavar="TOKENS",
        help="tokens of a text of code, or max; default: 100, 200, 372, 800, 1600, ... max",
    )
    group.add_argument(
        "--depth",
        type=Place(0),
        action="append",
        metavar="TOKENS",
        help="tokens in front of the suite's questions instead, or max",
    )
    group.add_argument("--temperature", type=TEMPERATURE, action="append", help="default: greedy")
    group.add_argument("--kind", action="append", help="with --depth: only this kind of question")
    group = sweep.add_argument_group("who answers; each may be repeated")
    group.add_argument("--drafter", action="append", help="default: auto")
    group.add_argument(
        "--policy", action="append", help="auto, fixed, adaptive or kelly, or with rows: fixed:8"
    )
    group.add_argument(
        "--block", type=BLOCK, action="append", help="rows, for policies that do not say theirs"
    )
    sweep.add_argument("--text", type=Path, help="tile this text instead of paceline's own")
    sweep.add_argument("--per-kind", type=COUNT, help="with --depth: N of each; default 1")
    sweep.add_argument("--rounds", type=COUNT, default=5)
    sweep.add_argument("--seed", type=SEED, default=0, help="of what is sampled")


def _add_simulate(simulate: ArgumentParser) -> None:
    simulate.add_argument(
        "--texts",
        type=Path,
        nargs="+",
        metavar="FILE",
        help="JSON lines with prompt and answer, a trace, a result, answers to train on, or text",
    )
    simulate.add_argument("--raw", action="store_true", help="prompts without the chat template")
    simulate.add_argument(
        "--prompt-tokens", type=COUNT, default=100, help="of plain text, how much is the prompt"
    )
    group = simulate.add_argument_group("who drafts; each may be repeated")
    group.add_argument("--drafter", action="append", help="default: auto")
    group.add_argument(
        "--policy", action="append", help="auto, fixed, adaptive or kelly, or with rows: fixed:8"
    )
    group.add_argument(
        "--block", type=BLOCK, action="append", help="rows, for policies that do not say theirs"
    )
    simulate.add_argument(
        "--cost",
        default="here",
        help="what calls cost: here (default), zaya, phi-4-mini, milliseconds by rows as in "
        "1=12,8=15.4, or the file of a recorded plan",
    )
    simulate.add_argument(
        "--carry", action="store_true", help="one process: a text learns from those before it"
    )
    group = simulate.add_argument_group("without texts: is it true?")
    group.add_argument(
        "--measure", action="store_true", help="answer a suite with the model, and simulate that"
    )
    group.add_argument("--rounds", type=COUNT, default=3)
    group.add_argument("--kind", action="append", help="only this kind of prompt; may be repeated")
    group.add_argument("--per-kind", type=COUNT, help="only N prompts of each kind")


def _add_peers(peers: ArgumentParser) -> None:
    peers.add_argument(
        "--peer",
        action="append",
        metavar="NAME",
        help="openvino-genai, llama-cpp-python, transformers, mlx-lm, or the base URL of a server; "
        "may be repeated; default: all that are installed",
    )
    peers.add_argument("--rounds", type=COUNT, default=3)
    peers.add_argument("--kind", action="append", help="only this kind of prompt; may be repeated")
    peers.add_argument("--per-kind", type=COUNT, help="only N prompts of each kind")
    peers.add_argument(
        "--draft-model", metavar="MODEL", help="a smaller model, for mlx-lm to draft with"
    )
    group = peers.add_argument_group("servers")
    group.add_argument("--served-model", metavar="NAME", help="default: the first that it has")
    group.add_argument("--api-key", help="what it wants to see")
    group.add_argument("--plain", metavar="JSON", help="fields of a request without speculation")
    group.add_argument("--speculation", metavar="JSON", help="fields of one with it")
