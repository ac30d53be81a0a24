"""The engines openvino and llamacpp, and llama.cpp's own `Llama` if it is installed, in turns.

    python benchmarks/engines.py --suite question.jsonl --limit 36 --output engines.json

Each prompt is answered by every contender, greedy, in a rotating order; ratios are of one prompt's
answers. Engines round otherwise, so their answers differ in tokens: speeds are tokens a second of
decoding. Within an engine, `auto` must give plain decoding's tokens, or the exit code is 1.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import NamedTuple

import paceline
from paceline.models import DEFAULT_MODEL
from paceline.verify.suite import Suite, SuitePrompt, load_suite, prompt_for
from paceline_lab.bench.record import here

ENGINES = ("openvino", "llamacpp")
PLAIN, AUTO = "plain", "auto"
PEER = "llama.cpp"


class Answer(NamedTuple):
    """Tokens of an answer, and its speed."""

    tokens: Sequence[int]
    tokens_per_second: float


Contender = Callable[[SuitePrompt, int], Answer]


def main() -> int:
    """Measure, print, and write the result to --output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--suite", type=Path, help="default: paceline's own")
    parser.add_argument("--limit", type=int)
    parser.add_argument("--per-kind", type=int)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--engine", action="append", choices=ENGINES, help="default: both")
    parser.add_argument("--peer-file", type=Path, help="GGUF file for llama.cpp's Llama")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    suite = load_suite(options.suite).only([], options.per_kind, options.limit)
    contenders: dict[str, Contender] = {}
    models = {
        engine: paceline.load(options.model, engine=engine, threads=options.threads)
        for engine in options.engine or ENGINES
    }
    for engine, model in models.items():
        model.measure_profile()
        for drafter, name in (("none", PLAIN), ("auto", AUTO)):
            contenders[f"{engine}, {name}"] = ours(model, drafter)
    if options.peer_file:
        model = next(iter(models.values()))
        contenders[PEER] = peer(model, options.peer_file, options.threads)
    speeds, kinds, differ = measure(suite, contenders, options.max_tokens, [*models])
    report(speeds, kinds, [*models])
    value = {
        **here(),
        "command": f"python {' '.join(sys.argv)}",
        "model": options.model,
        "engines": {engine: model.engine.describe() for engine, model in models.items()},
        "suite_sha256": suite.sha256,
        "max_tokens": options.max_tokens,
        "answers_that_differ": differ,
        "kinds": kinds,
        "tokens_per_second": speeds,
    }
    if options.output:
        options.output.write_text(json.dumps(value, indent=1) + "\n")
    return int(bool(differ))


def ours(model: paceline.Model, drafter: str) -> Contender:
    """An engine of paceline."""

    def answer(prompt: SuitePrompt, max_tokens: int) -> Answer:
        text = prompt_for(model.files, prompt.messages)
        result = model.generate(
            text, max_tokens=max_tokens, drafter=drafter, temperature=0.0, generation_config="none"
        )
        return Answer(result.token_ids, result.stats.decode_tokens_per_second)

    return answer


def peer(model: paceline.Model, path: Path, threads: int | None) -> Contender:
    """llama.cpp's `Llama`, as its package sets it, on a GGUF file."""
    from llama_cpp import Llama

    cores = threads or here()["machine"]["cores"]
    llama = Llama(str(path), n_ctx=4096, n_threads=cores, n_threads_batch=cores, verbose=False)

    def answer(prompt: SuitePrompt, max_tokens: int) -> Answer:
        llama.reset()
        answer: list[int] = []
        ids = model.tokens(prompt_for(model.files, prompt.messages))
        began = perf_counter()
        for token in llama.generate(ids, temp=0.0, repeat_penalty=1.0):
            if not answer:
                began = perf_counter()
            answer.append(token)
            if token in model.files.stop_token_ids or len(answer) == max_tokens:
                break
        return Answer(answer, (len(answer) - 1) / (perf_counter() - began))

    return answer


def measure(
    suite: Suite, contenders: Mapping[str, Contender], max_tokens: int, engines: Sequence[str]
) -> tuple[dict[str, list[float]], list[str], list[str]]:
    """Tokens per second by contender and prompt, the prompts' kinds, and those that differ.

    An answer of one token has no speed: such a prompt is compared, and has no figures.
    """
    speeds: dict[str, list[float]] = {name: [] for name in contenders}
    names, kinds, differ = [*contenders], [], []
    for name in names:  # first calls
        contenders[name](suite.prompts[0], 4)
    for at, prompt in enumerate(suite.prompts):
        turn = at % len(names)
        answers = {
            name: contenders[name](prompt, max_tokens) for name in names[turn:] + names[:turn]
        }
        if all(answer.tokens_per_second for answer in answers.values()):
            kinds.append(prompt.kind)
            for name, answer in answers.items():
                speeds[name].append(answer.tokens_per_second)
        for engine in engines:
            plain, auto = (answers[f"{engine}, {name}"].tokens for name in (PLAIN, AUTO))
            if list(plain) != list(auto):
                differ.append(f"{prompt.id}, {engine}")
        if sys.stderr.isatty():
            print(f"\r{at + 1} of {len(suite.prompts)} prompts", end="", file=sys.stderr)
    return speeds, kinds, differ


def report(
    speeds: Mapping[str, Sequence[float]], kinds: Sequence[str], engines: Sequence[str]
) -> None:
    """Print medians, and ratios over every other contender: geometric mean, least and most."""
    for name, values in speeds.items():
        print(f"{name}: median {median(values):.1f} tokens/s")
    for name in speeds:
        for other in speeds:
            if name == other:
                continue
            ratios = [one / two for one, two in zip(speeds[name], speeds[other], strict=True)]
            print(
                f"{name} / {other}: {geometric(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
            )
    for engine in engines:
        for kind in dict.fromkeys(kinds):
            pairs = zip(
                kinds, speeds[f"{engine}, {AUTO}"], speeds[f"{engine}, {PLAIN}"], strict=True
            )
            print(engine, kind, f"{geometric([a / p for k, a, p in pairs if k == kind]):.2f}")


def geometric(ratios: Sequence[float]) -> float:
    """Geometric mean."""
    return math.exp(mean(map(math.log, ratios)))


if __name__ == "__main__":
    sys.exit(main())
