"""Block sizes and policies with a neural drafter, by how much text stands before the question.

    python benchmarks/context_depth.py --output benchmarks/results/context-depth.json

The comparison of the DFlash-on-MLX seed, on this machine: plain decoding, fixed blocks of 4, 8 and
16, Kelly-optimal drafting and auto, at several context depths. A chart is drawn beside the output.
"""

import argparse
from pathlib import Path
from typing import Any

import paceline
from paceline.artifacts import write_json
from paceline.bench.compare import Comparison, Contender, compare
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
    parser.add_argument("--output", type=Path)
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
    found: dict[int, Comparison] = {}
    for depth in DEPTHS:
        deep = at_depth(model, suite, depth, options.max_tokens)
        print(f"context depth {depth}")
        found[depth] = compare(
            deep, contenders, rounds=options.rounds, max_tokens=options.max_tokens, watch=print
        )
        print("  ".join(f"{name} {ratio:.2f}" for name, ratio in found[depth].means().items()))
    value = {
        "command": f"python benchmarks/context_depth.py --drafter {options.drafter}",
        "model": model.files.name,
        "engine": model.engine.describe(),
        "suite_sha256": suite.sha256,
        "depths": {str(depth): comparison.as_dict() for depth, comparison in found.items()},
    }
    if options.output is not None:
        write_json(options.output, value)
        draw(found, options.output.with_suffix(".png"))


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


def draw(found: dict[int, Comparison], path: Path) -> None:
    """Speed over plain by depth, a line for each way."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    styles = zip(WAYS, ("o:", "s:", "^:", "x--", "o-"), strict=True)
    for name, style in styles:
        ratios = [comparison.means()[name] for comparison in found.values()]
        axes.plot([str(depth) for depth in found], ratios, style, label=name, color="black")
    axes.axhline(1, color="gray", linewidth=0.8)
    axes.set_xlabel("tokens before the question")
    axes.set_ylabel("speed over plain decoding")
    axes.legend()
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
