"""The arguments of what measures and checks: bench, verify, plan."""

from pathlib import Path
from typing import Any

from paceline.arguments.shared import Add, Parser, add_model, count


def add_bench(add: Add, under: Any) -> None:
    """The commands `bench ...` and `verify`."""
    bench = under.add_parser("bench", help="Measure.", description="Measure.")
    within = bench.add_subparsers(required=True, metavar="command", parser_class=Parser)
    run = add("bench run", "Compare drafters with plain decoding on a suite.", within)
    run.add_argument("--drafter", action="append", help="a contender; may be repeated")
    run.add_argument("--policy", default="auto")
    run.add_argument("--rounds", type=count, default=3)
    run.add_argument("--kind", action="append", help="only this kind of prompt; may be repeated")
    run.add_argument("--per-kind", type=count, help="only so many prompts of each kind")
    serve = add("bench serve", "Load a server, ours or another OpenAI-compatible one.", within)
    serve.add_argument("--url", default="http://127.0.0.1:8000/v1", help="its base URL")
    serve.add_argument("--model", help="default: the first that it has")
    serve.add_argument("--api-key", help="what it wants to see")
    serve.add_argument(
        "--clients", type=count, action="append", help="who ask at once; may be repeated"
    )
    serve.add_argument(
        "--rate", type=float, action="append", help="requests a second; may be repeated"
    )
    serve.add_argument("--requests", type=count, default=32, help="how many for each load")
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
        made.add_argument("--max-tokens", type=count, default=tokens)
        made.add_argument("--output", type=Path, help="write the result as JSON, too")
    for made in (run, verify):
        add_model(made)
