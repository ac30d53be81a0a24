"""`bench agent`: recorded sessions by plain decoding, drafters and a server, as a record."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from statistics import median

from paceline.client import Access, connect
from paceline.models import Progress
from paceline.runtime.model import Model
from paceline.runtime.request import check
from paceline.storage.report import Report, Table
from paceline_lab.agent.replay import Replayed, replay_here, replay_there
from paceline_lab.agent.session import SessionTurn, load_sessions
from paceline_lab.bench.ab_test import (
    PLAIN,
    about,
    contender_options,
    interleaved,
    max_context,
    options_facts,
)
from paceline_lab.bench.journal import measured_rows, open_journal
from paceline_lab.bench.record import Record, Row
from paceline_lab.bench.turns import Skipped
from paceline_lab.journals import journal_path

SECONDS, FIRST = "seconds", "first_token_seconds"


def bench_agent(
    load: Callable[[], Model],
    *,
    path: Path | None,
    drafters: Sequence[str],
    rounds: int,
    url: str | None,
    access: Access,
    output: Path | None,
    progress: Progress,
) -> Report:
    """Replay the session in a file, or paceline's own, with every drafter and without.

    With `url` a server of the model answers the same prompts. Turns that do not fit the context are
    left out. The report passes if there are others and none failed. Raises InvalidRequest for a
    file that is no session, an invalid option, or no server at the URL.
    """
    sessions = load_sessions(path)
    options = contender_options(drafters, (), ())
    for settings in options.values():
        check(settings)
    server = None if url is None else [*connect(url, access).values()][-1]
    model = load()
    model.measured_costs()
    head = Record(
        "agent",
        rows=[],
        settings={
            "sessions": [session.name for session in sessions],
            "contenders": options_facts(options),
            **({} if server is None else {"server": server.name, "served": server.model}),
            "rounds": rounds,
        },
        suite_sha256=sha256("".join(s.sha256 for s in sessions).encode()).hexdigest(),
        **about(model),
    )
    rows: list[Row] = []
    skipped: list[Skipped] = []
    room = max_context(model)
    with open_journal(output, head) as journal:
        for number, session in enumerate(sessions, start=1):
            turns = []
            for turn in session.turns(model):
                if (size := len(turn.prompt) + len(turn.answer)) > room:
                    skipped.append(Skipped(turn.name, size, room))
                else:
                    turns.append(turn)
            replays = {
                name: partial(replay_here, model, turns, settings)
                for name, settings in options.items()
            }
            if server is not None:
                replays[server.name] = partial(replay_there, server, turns)
            call = partial(_measure, session.name, turns, replays, rounds)
            place = f"{number}/{len(sessions)}"
            rows += measured_rows(journal, session.name, call, progress, place)
    failed = [f"{row.case} ({row.contender}): {e}" for row in rows if (e := row.facts.get("error"))]
    passed = bool(rows) and not failed and all(row.facts.get("same_tokens", True) for row in rows)
    names = dict.fromkeys(row.kind for row in rows)
    totals = {name: _totals([row for row in rows if row.kind == name]) for name in names}
    skips = {"skipped": [turn._asdict() for turn in skipped], "failed": failed}
    record = replace(head, rows=rows, summary={"totals": totals, **skips})
    tables = [table for name in names for table in _tables(name, rows, totals[name])]
    text = "\n".join([*map(str, skipped), *failed])
    return Report(record.as_dict(), passed, text, tables, journal_path(output))


def _measure(
    session: str,
    turns: Sequence[SessionTurn],
    replays: Mapping[str, Callable[[], list[Replayed]]],
    rounds: int,
) -> list[Row]:
    """Replay a session with all contenders in turn: a row per turn and contender."""
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
    """A turn by a contender; one that failed in a round has the error in its facts."""
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


def _totals(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Contender -> figures of the turns that did not fail; times are medians of the rounds."""
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


def _tables(
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
