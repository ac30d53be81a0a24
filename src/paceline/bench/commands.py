"""What the commands `bench run`, `verify` and `plan` do; printing is the command line's."""

import datetime
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import paceline
from paceline.bench.compare import PLAIN, SINGLE_ROW, Comparison, Contender, compare
from paceline.bench.load import Run, Target, closed_loop, model_of, open_loop
from paceline.bench.plan import ZAYA, best_by_chance
from paceline.bench.plan import plan as plan_rows
from paceline.bench.suite import Suite, load_suite
from paceline.bench.verify import Verdict, cases, check_rows, check_tokens, drafters_of
from paceline.bench.work import Counted, as_dict
from paceline.bench.work import tables as work_tables
from paceline.decoding.costs import CostTable
from paceline.errors import InvalidRequest
from paceline.models import Progress
from paceline.options import check
from paceline.runtime import Model

Table = tuple[str, Sequence[str], Sequence[Sequence[str]]]
"""Title, head, rows."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a command found out."""

    value: dict[str, Any]
    """For JSON."""
    passed: bool = True
    text: str = ""
    tables: Sequence[Table] = field(default_factory=tuple)


def bench_run(
    load: Callable[[int], Model],
    *,
    suite: Path | None,
    kinds: Sequence[str],
    per_kind: int | None,
    drafters: Sequence[str],
    policy: str,
    rounds: int,
    max_tokens: int,
    progress: Progress,
) -> Report:
    """Plain decoding, single-row plain decoding and the drafters on a suite, in turns.

    `load` opens the model with so many rows a call at least.
    """
    prompts = load_suite(suite).only(kinds, per_kind)
    for name in drafters:
        check({"drafter": name, "policy": policy})
    model = load(2)
    model.measure()
    contenders = [
        Contender(PLAIN, model, {"drafter": "none"}),
        Contender(SINGLE_ROW, load(1), {"drafter": "none"}),
        *(Contender(name, model, {"drafter": name, "policy": policy}) for name in drafters),
    ]
    found = compare(prompts, contenders, rounds=rounds, max_tokens=max_tokens, watch=progress.say)
    # Single-row decoding is not held to it: it is there to be an honest baseline.
    same = all(row.same_tokens for row in found.rows if row.contender != SINGLE_ROW)
    value = {
        **_about(model, prompts),
        "policy": policy,
        "rounds": rounds,
        "max_tokens": max_tokens,
        "same_tokens": same,
        **found.as_dict(),
    }
    return Report(value, same, tables=[_by_kind(found), _by_prompt(found)])


def bench_serve(
    *,
    url: str,
    model: str | None,
    key: str | None,
    clients: Sequence[int],
    rates: Sequence[float],
    requests: int,
    suite: Path | None,
    kinds: Sequence[str],
    max_tokens: int,
    extra: str,
    progress: Progress,
) -> Report:
    """A server under load: with so many clients at once, and with requests at so many a second.

    Raises:
        InvalidRequest: there is no such server, or a value is out of range.
    """
    prompts = load_suite(suite).only(kinds, None)
    url = url.rstrip("/")
    try:
        fields = json.loads(extra)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise InvalidRequest(f"--extra is {extra!r}; expected a JSON object")
    target = Target(url, model or model_of(url, key), max_tokens, key, extra)
    loads: list[tuple[str, Callable[..., Run]]] = [
        *((f"{n} clients", partial(closed_loop, clients=n)) for n in clients),
        *((f"{rate:g} requests/s", partial(open_loop, rate=rate)) for rate in rates),
    ]
    runs = []
    for name, run in loads:
        with progress.task(f"asking {target.model}: {name}", requests, unit="requests") as reach:
            done = count(1)
            watch = lambda _, done=done, reach=reach: reach(next(done))  # noqa: E731
            runs.append(run(target, prompts.prompts, requests=requests, watch=watch))
    found = [run.as_dict() for run in runs]
    value = {
        "made": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "url": url,
        "model": target.model,
        "extra": fields,
        "max_tokens": max_tokens,
        "suite_sha256": prompts.sha256,
        "runs": found,
    }
    rows = [_load_row(each) for each in found]
    head = ("load", "tokens/s", "first token p50", "p99", "per token p50", "p99", "failed")
    passed = not any(each["failed"] for each in found)
    return Report(value, passed, tables=[(f"{target.model} at {url}", head, rows)])


def _load_row(run: dict[str, Any]) -> list[str]:
    def milliseconds(name: str, which: str) -> str:
        return "-" if run[name] is None else f"{run[name][which] * 1e3:.0f} ms"

    return [
        run["load"],
        f"{run['tokens_per_second']:.1f}",
        milliseconds("first_token", "p50"),
        milliseconds("first_token", "p99"),
        milliseconds("per_token", "p50"),
        milliseconds("per_token", "p99"),
        f"{run['failed']} of {run['requests']}",
    ]


def verify(
    load: Callable[[], Model],
    *,
    suite: Path | None,
    max_tokens: int,
    whole: bool,
    drafters: Sequence[str],
    progress: Progress,
) -> Report:
    """Row invariance and token parity, with a verdict. `load` opens the model.

    `drafters` are those to check; none named: all that the model has.
    """
    prompts = load_suite(suite)
    for name in drafters:
        check({"drafter": name})
    model = load()
    verdict = Verdict()
    with progress.task("comparing rows"):
        check_rows(model.engine, verdict)
    chosen = cases(whole=whole, chosen_from=drafters or drafters_of(model))
    label = f"comparing answers ({len(chosen)} combinations)"
    with progress.task(label, len(chosen), unit="combinations") as reach:
        check_tokens(
            model,
            prompts,
            chosen,
            verdict,
            max_tokens=max_tokens,
            together=(1, 2, 1, 3, 1, 5, 1, 8),
            watch=reach,
        )
    invariant = "are" if not verdict.rows_differing else "are NOT"
    lines = [
        f"rows: {verdict.rows_compared} compared, {verdict.rows_differing} differ"
        + (f" by up to {verdict.largest_difference:.3g}" if verdict.rows_differing else ""),
        f"answers: {verdict.answers_compared} compared ({verdict.tokens_compared} tokens), "
        f"{len(verdict.answers_differing)} differ",
        *verdict.answers_differing[:10],
        f"verdict: {model.files.name} on the {model.engine.name} engine "
        f"{'is' if verdict.exact else 'is NOT'} exact here: rows {invariant} independent of how "
        "they are computed",
    ]
    value = {**_about(model, prompts), "max_tokens": max_tokens, "whole": whole}
    return Report({**value, **verdict.as_dict()}, verdict.exact, "\n".join(lines))


def plan(model: Model, *, again: bool) -> Report:
    """The cost table of this machine, and the seed experiment's in the same formula.

    Between them the work of a call by part, where the engine can say.
    """
    measurement = model.measure(again=again)
    here, zaya = measurement.cost, CostTable(ZAYA)
    value = {
        "model": model.files.name,
        "engine": model.engine.describe(),
        "context": measurement.context,
        "row_invariant": measurement.row_invariant,
        "plain_milliseconds": here(1) * 1e3,
        "rows": plan_rows(here),
        "best": _best(here),
        "zaya": {"plain_milliseconds": zaya(1) * 1e3, "rows": plan_rows(zaya), "best": _best(zaya)},
    }
    title = f"{model.files.name} on this machine, plain {here(1) * 1e3:.1f} ms a token"
    other = "the ZAYA experiment (soft-routed MoE, Neural Engine), plain 112 ms a token"
    counted: list[Table] = []
    if isinstance(model.engine, Counted):
        work = model.engine.work()
        value["work"], counted = as_dict(work), [*work_tables(work)]
    return Report(value, tables=[_plan_table(title, here), *counted, _plan_table(other, zaya)])


def _about(model: Model, suite: Suite) -> dict[str, Any]:
    return {
        "paceline": paceline.__version__,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": model.files.name,
        "fingerprint": model.files.fingerprint,
        "engine": model.engine.describe(),
        "suite_sha256": suite.sha256,
        "prompts": len(suite.prompts),
    }


def _best(cost: CostTable) -> dict[str, dict[str, float]]:
    found = best_by_chance(cost)
    return {str(p): {"rows": rows, "speed_up": gain} for p, (rows, gain) in found.items()}


def _plan_table(title: str, cost: CostTable) -> Table:
    planned = plan_rows(cost)
    rows = []
    for row in planned:
        even = row["break_even"]
        gains = [f"{gain:.2f}" for gain in row["speed_up"].values()]
        rows.append(
            [
                str(row["rows"]),
                f"{row['milliseconds']:.1f}",
                f"{row['ratio']:.2f}",
                "never" if even is None else f"{even:.2f}",
                *gains,
            ]
        )
    chances = [f"p={chance}" for chance in planned[0]["speed_up"]]
    return title, ["rows", "ms", "/ plain", "break-even p", *chances], rows


def _by_kind(found: Comparison) -> Table:
    names = found.contenders[1:]
    means, single = found.means(), found.means_single_row()
    rows = [[kind, *(f"{found.means(kind)[n]:.2f}" for n in names)] for kind in found.kinds]
    rows.append(["all", *(f"{means[n]:.2f}" for n in names)])
    rows.append(["worst prompt", *(f"{found.worst(n).ratio:.2f}" for n in names)])
    rows.append(["all, against 1 row", *(f"{single[n]:.2f}" for n in names)])
    return "speed over plain decoding, geometric means", ["kind", *names], rows


def _by_prompt(found: Comparison) -> Table:
    rows = [
        [
            row.prompt,
            row.contender,
            str(row.tokens),
            f"{row.tokens_per_second:.1f}",
            f"{row.tokens_per_step:.2f}",
            f"{100 * row.acceptance_rate:.0f} %",
            f"{100 * row.host_share:.1f} %",
            f"{row.ratio:.2f}",
            "" if row.ratio_single_row is None else f"{row.ratio_single_row:.2f}",
            "yes" if row.same_tokens else "NO",
        ]
        for row in found.rows
    ]
    head = ["prompt", "contender", "tokens", "tok/s", "tau", "accepted", "host"]
    return "prompts", [*head, "/ plain", "/ 1 row", "same tokens"], rows
