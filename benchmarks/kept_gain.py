"""What kept answers gain, by how many tokens of them there are: by replay, without a model.

    python benchmarks/kept_gain.py TEXTS... --cost benchmarks/results/plan.json

TEXTS are files or folders that `bench simulate` reads. They are divided into folds: the answers of
one are replayed with `kept` counted from the first N tokens of the others, and without. Every
answer is replayed as the first of a process. Answers in a loop are left out on both sides, by the
rule by which they are not kept.
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import geometric_mean

from paceline.decoding.stopping import RepetitionDetector
from paceline.drafters import DrafterResources, KeptText
from paceline.models import Progress, resolve
from paceline.runtime.kept import LOOP
from paceline.runtime.request import check
from paceline_lab.simulate.command import drafter_resources
from paceline_lab.simulate.costs import Costs, parse_costs
from paceline_lab.simulate.replay import Recording, simulate
from paceline_lab.simulate.texts import Texts

MODEL = "smollm2-135m"
ALL = "all"


def main() -> None:
    """Print the gain as JSON: by kind of answer, and by tokens seen."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("texts", nargs="+", type=Path)
    parser.add_argument("--cost", required=True)
    parser.add_argument("--drafter", default="suffix", help="what `kept` is joined to")
    parser.add_argument("--seen", type=int, nargs="+", default=[1000, 3000, 10_000, 30_000, 10**6])
    parser.add_argument("--folds", type=int, default=4)
    parser.add_argument("--first", type=Path, nargs="*", default=[], help="texts seen before those")
    options = parser.parse_args()
    files = resolve(MODEL, progress=Progress())
    size = max(files.tokenizer().vocabulary.values()) + 1
    texts = Texts(lambda: files)
    recordings = shuffled(texts.read(options.texts))
    before = shuffled(texts.read(options.first)) if options.first else []
    cost = parse_costs(options.cost, lambda: files)  # type: ignore[arg-type, return-value]
    shared = drafter_resources(MODEL, {"": {"drafter": options.drafter}}, Progress())
    plain: dict[str, list[float]] = defaultdict(list)
    gains: dict[int, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    counted: dict[int, int] = {}
    for fold in range(options.folds):
        tested = recordings[fold :: options.folds]
        others = [each for at, each in enumerate(recordings) if at % options.folds != fold]
        base = speeds(tested, options.drafter, None, cost, shared)
        for each, speed in zip(tested, base, strict=True):
            plain[each.kind].append(speed)
            plain[ALL].append(speed)
        for tokens in options.seen:
            answers = first([*before, *others], tokens)
            counted[tokens] = sum(map(len, answers))
            kept = KeptText.count(answers, size)
            found = speeds(tested, f"{options.drafter}+kept", kept, cost, shared)
            for each, speed, without in zip(tested, found, base, strict=True):
                gains[tokens][each.kind].append(speed / without)
                gains[tokens][ALL].append(speed / without)
    kinds = sorted(plain)
    rows = {
        f"{options.drafter} over plain": {kind: geometric_mean(plain[kind]) for kind in kinds},
        **{
            f"gain of kept, {counted[tokens]} tokens": {
                kind: geometric_mean(gains[tokens][kind]) for kind in kinds
            }
            for tokens in options.seen
        },
        "answers": {kind: len(plain[kind]) for kind in kinds},
        "least gain": {str(counted[tokens]): min(gains[tokens][ALL]) for tokens in options.seen},
    }
    print(json.dumps(rows, indent=1))


def shuffled(recordings: Sequence[Recording]) -> list[Recording]:
    """Recordings that are not in a loop, in an order that is the same in every run."""
    found = [each for each in recordings if len(each.answer) > 1 and not loops(each.answer)]
    Random(0).shuffle(found)
    return found


def loops(answer: Sequence[int]) -> bool:
    """Whether an answer would not be kept."""
    detector = RepetitionDetector(LOOP)
    return any(map(detector.push, answer))


def first(recordings: Sequence[Recording], tokens: int) -> list[Sequence[int]]:
    """The first answers, with about this many tokens."""
    found: list[Sequence[int]] = []
    for each in recordings:
        if tokens <= 0:
            break
        found.append(each.answer)
        tokens -= len(each.answer)
    return found


def speeds(
    recordings: Sequence[Recording],
    drafter: str,
    kept: KeptText | None,
    cost: Costs,
    shared: DrafterResources,
) -> list[float]:
    """Speed over plain decoding of each answer."""
    request = check({"drafter": drafter})
    found = simulate(recordings, request, cost.table, shared, kept=kept)
    return [each.speed_up for each in found]


if __name__ == "__main__":
    main()
