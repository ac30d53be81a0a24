"""Block sizes and policies with a neural drafter, by how much text stands before the question.

    python benchmarks/context_depth.py --output benchmarks/results/context-depth.json

The comparison of the DFlash-on-MLX seed, on this machine: plain decoding, fixed blocks of 4, 8 and
16, Kelly-optimal drafting and auto, at several context depths. A chart is drawn beside the output.
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import paceline
from paceline.artifacts import read_json, write_json
from paceline.bench.compare import Contender, compare
from paceline.bench.suite import Suite, SuitePrompt, load_suite
from paceline.options import Options

DEPTHS = (0, 512, 2048, 8192)
"""Tokens of context; the last is cut to what the model holds, the answer included."""

WAYS: dict[str, Options] = {
    "fixed 4": {"policy": "fixed", "max_block": 4},
    "fixed 8": {"policy": "fixed", "max_block": 8},
    "fixed 16": {"policy": "fixed", "max_block": 16},
    "kelly": {"policy": "kelly", "max_block": 16},
    "auto": {"policy": "auto"},
}
KINDS = ("chat", "arithmetic", "story")


def main() -> None:
    """Run, print, and write the result and the chart where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drafter", default="dflash")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--per-kind", type=int, default=2)
    parser.add_argument("--depth", type=int, action="append", help="default: 0, 512, 2048, 8192")
    parser.add_argument("--output", type=Path, help="depths that are in it already are kept")
    options = parser.parse_args()
    model = paceline.load(drafters=[options.drafter])
    model.measure()
    suite = load_suite().only(KINDS, options.per_kind)
    contenders = [
        Contender("plain", model, {"drafter": "none"}),
        *(
            Contender(name, model, {"drafter": options.drafter, **way})
            for name, way in WAYS.items()
        ),
    ]
    value: dict[str, Any] = {
        "drafter": options.drafter,
        "model": model.files.name,
        "engine": model.engine.describe(),
        "suite_sha256": suite.sha256,
        "depths": {},
    }
    if options.output is not None and options.output.exists():
        value["depths"] = read_json(options.output)["depths"]
    for depth in options.depth or DEPTHS:
        if str(depth) in value["depths"]:
            continue
        deep = at_depth(model, suite, depth, options.max_tokens)
        print(f"context depth {depth}", flush=True)
        found = compare(
            deep, contenders, rounds=options.rounds, max_tokens=options.max_tokens, watch=print
        )
        print("  ".join(f"{name} {ratio:.2f}" for name, ratio in found.means().items()))
        how = {"rounds": options.rounds, "per_kind": options.per_kind}
        value["depths"][str(depth)] = {**how, **found.as_dict()}
        if options.output is not None:
            write_json(options.output, value)
            draw(value["depths"], options.output.with_suffix(".png"))


def at_depth(model: paceline.Model, suite: Suite, depth: int, max_tokens: int) -> Suite:
    """The prompts with other prompts' text in front of them, so that `depth` tokens stand there."""
    encode = model.files.tokenizer().encode
    decode = model.files.tokenizer().decode
    text = "\n\n".join(str(m["content"]) for p in load_suite().prompts for m in p.messages)
    tokens = encode(text)
    while len(tokens) < depth:
        tokens += tokens
    prompts = []
    for prompt in suite.prompts:
        room = model.files.context_length - max_tokens - len(model.tokens(prompt.messages)) - 64
        before = decode(tokens[: min(depth, room)])
        last: dict[str, Any] = prompt.messages[-1]
        content = f"{before}\n\n{last['content']}" if depth else last["content"]
        messages = [*prompt.messages[:-1], {**last, "content": content}]
        prompts.append(SuitePrompt(prompt.id, prompt.kind, messages))
    return Suite(prompts, suite.sha256)


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Speed over plain by depth, a line for each way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    styles = zip(WAYS, ("o:", "s:", "^:", "x--", "o-"), strict=True)
    for name, style in styles:
        ratios = [comparison["geometric_means"][name] for comparison in found.values()]
        axes.plot(list(found), ratios, style, label=name, color="black")
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_xlabel("tokens before the question")
    axes.set_ylabel("speed over plain decoding")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
