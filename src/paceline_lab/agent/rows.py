"""Rows, totals and tables of replayed sessions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median

from paceline.storage.report import Table
from paceline_lab.agent.replay import Replayed
from paceline_lab.agent.session import SessionTurn
from paceline_lab.bench.ab_test import PLAIN, interleaved
from paceline_lab.bench.record import Row

SECONDS, FIRST = "seconds", "first_token_seconds"


def measure_session(
    session: str,
    turns: Sequence[SessionTurn],
    replays: Mapping[str, Callable[[], list[Replayed]]],
    rounds: int,
) -> list[Row]:
    """Replay a session with all contenders in turn; return one row per turn and contender."""
    answers = interleaved(replays, rounds)
    rows = []
    for place, turn in enumerate(turns):
        plain = [replayed[place] for replayed in answers[PLAIN]]
        for contender in answers:
            replayed = [by_turn[place] for by_turn in answers[contender]]
            rows.append(_row(session, turn, contender, replayed, plain))
    return rows


def _row(
    session: str,
    turn: SessionTurn,
    contender: str,
    replayed: Sequence[Replayed],
    plain: Sequence[Replayed],
) -> Row:
    """Return a turn's row for a contender; if a round failed, the facts have the error."""
    first = replayed[0]
    pairs = [*zip(plain, replayed, strict=True)]
    measures = {
        SECONDS: [answer.seconds for answer in replayed],
        FIRST: [answer.first_token_seconds for answer in replayed],
    }
    if all(base.decode_seconds > 0 < answer.decode_seconds for base, answer in pairs):
        measures |= {
            "ratio": [base.decode_seconds / answer.decode_seconds for base, answer in pairs],
            "ratio_with_prefill": [base.seconds / answer.seconds for base, answer in pairs],
        }
    error = next((answer.error for answer in replayed if answer.error), "")
    facts = {
        "tokens": first.tokens,
        "prompt_tokens": len(turn.prompt),
        "cached_tokens": first.cached_tokens,
        **({} if first.same is None else {"same_tokens": all(one.same for one in replayed)}),
        **({"error": error} if error else {}),
    }
    counts = {"steps": sum(answer.steps for answer in replayed)}
    return Row(turn.name, session, contender, measures, {"turn": turn.number}, counts, facts)


def totals_of(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return contender -> figures of its successful turns; times are medians over the rounds."""
    totals: dict[str, dict[str, float]] = {}
    for name in dict.fromkeys(row.contender for row in rows):
        own = [row for row in rows if row.contender == name and "error" not in row.facts]
        seconds = sum(median(row.measures[SECONDS]) for row in own)
        tokens, prompt, reused = (
            sum(row.facts[fact] for row in own)
            for fact in ("tokens", "prompt_tokens", "cached_tokens")
        )
        totals[name] = {
            "turns": len(own),
            SECONDS: seconds,
            "tokens_per_second": tokens / seconds if seconds else 0.0,
            "prompt_tokens_computed": prompt - reused,
            "prompt_tokens_reused": reused,
        }
    return totals


def tables_of(
    session: str, rows: Sequence[Row], totals: Mapping[str, Mapping[str, float]]
) -> Iterator[Table]:
    head = ["contender", "turns", "seconds", "tokens/s", "prompt computed", "reused"]
    figures = [
        [name, *(f"{value:,.2f}".removesuffix(".00") for value in total.values())]
        for name, total in totals.items()
    ]
    yield f"{session}: all turns", head, figures
    turns: dict[str, list[str]] = {}
    for row in rows:
        if row.kind == session:
            cells = turns.setdefault(row.case, [row.case, f"{row.facts['prompt_tokens']:,}"])
            cells.append("-" if "error" in row.facts else f"{median(row.measures[FIRST]):.2f}")
    yield "seconds to the first token", ["turn", "prompt", *totals], [*turns.values()]
