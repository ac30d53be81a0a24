"""What the comparisons with other runtimes share: rounds in turns, ratios within a round."""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple, Protocol

import paceline
from paceline.bench.suite import Suite

OURS, OURS_PLAIN = "paceline auto", "paceline plain"


class Contender(Protocol):
    """A runtime, set up one way, greedy."""

    def answer(self, tokens: list[int], max_tokens: int) -> tuple[list[int], float]:
        """Token ids, and tokens per second after the first."""
        ...


class Ours:
    """The same through paceline, a fresh request each time."""

    def __init__(self, model: paceline.Model, drafter: str) -> None:
        self._model = model
        self._drafter = drafter

    def answer(self, tokens: list[int], max_tokens: int) -> tuple[list[int], float]:
        """Token ids, and tokens per second after the first."""
        fresh = self._model.fresh()
        found = fresh.generate(tokens, max_tokens=max_tokens, drafter=self._drafter)
        return found.token_ids, found.stats.decode_tokens_per_second


class Peer(NamedTuple):
    """Another runtime's speculation, and its own plain decoding."""

    speculative: str
    plain: str


def arguments(about: str) -> argparse.Namespace:
    """What the scripts take."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    return parser.parse_args()


def run(
    model: paceline.Model,
    suite: Suite,
    contenders: Mapping[str, Contender],
    peers: Sequence[Peer],
    options: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Answer the suite with all contenders; a row for each prompt, printed as it comes."""
    rows = []
    for number, prompt in enumerate(suite.prompts):
        tokens = model.tokens(prompt.messages)
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        answers: dict[str, list[int]] = {}
        for turn in range(options.rounds):
            names = list(contenders)
            shift = (turn + number) % len(names)
            for name in names[shift:] + names[:shift]:
                answers[name], rate = contenders[name].answer(tokens, options.max_tokens)
                rates[name].append(rate)
        rows.append(
            {
                "prompt": prompt.id,
                "kind": prompt.kind,
                "tokens_per_second": {name: round(median(rates[name]), 2) for name in rates},
                "paceline_over": {
                    name: _ratio(rates, OURS, name) for name in contenders if name != OURS
                },
                "over_own_plain": {
                    **{peer.speculative: _ratio(rates, *peer) for peer in peers},
                    OURS: _ratio(rates, OURS, OURS_PLAIN),
                },
                "changed_own_text": {
                    **{p.speculative: answers[p.speculative] != answers[p.plain] for p in peers},
                    OURS: answers[OURS] != answers[OURS_PLAIN],
                },
                "same_text_as_paceline": {
                    name: answers[name] == answers[OURS] for name in contenders
                },
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    return rows


def report(
    rows: list[dict[str, Any]], about: Mapping[str, Any], options: argparse.Namespace
) -> None:
    """Print the geometric means, and write everything where asked."""
    speculative = rows[0]["changed_own_text"].keys()
    kept = {
        name: [row for row in rows if not row["changed_own_text"][name]] for name in speculative
    }
    result = {
        **about,
        "max_tokens": options.max_tokens,
        "rounds": options.rounds,
        "prompts": len(rows),
        "texts_changed": {name: len(rows) - len(kept[name]) for name in speculative},
        "over_own_plain": {
            name: _mean(row["over_own_plain"][name] for row in rows) for name in speculative
        },
        "paceline_over": {
            name: _mean(row["paceline_over"][name] for row in rows)
            for name in rows[0]["paceline_over"]
        },
        "paceline_over_where_text_is_kept": {
            name: _mean(row["paceline_over"][name] for row in kept[name])
            for name in speculative
            if name != OURS and kept[name]
        },
        "same_text_as_paceline": {
            name: sum(row["same_text_as_paceline"][name] for row in rows)
            for name in rows[0]["same_text_as_paceline"]
        },
        "paceline_over_where_texts_are_equal": {
            name: _mean(
                row["paceline_over"][name] for row in rows if row["same_text_as_paceline"][name]
            )
            for name in rows[0]["paceline_over"]
            if any(row["same_text_as_paceline"][name] for row in rows)
        },
        "rows": rows,
    }
    print(json.dumps({key: result[key] for key in result if key != "rows"}, indent=1))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")


def _ratio(rates: Mapping[str, list[float]], mine: str, theirs: str) -> float:
    pairs = zip(rates[mine], rates[theirs], strict=True)
    return round(median(a / b for a, b in pairs), 3)


def _mean(values: Any) -> float:
    return round(geometric_mean(values), 3)
