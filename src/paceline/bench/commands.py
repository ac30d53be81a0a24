"""What the commands `verify` and `plan` do; printing is the command line's."""

import datetime
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import paceline
from paceline.bench.output import Report, Table
from paceline.bench.plan import ZAYA, best_by_chance
from paceline.bench.plan import plan as plan_rows
from paceline.bench.suite import Suite, load_suite
from paceline.bench.verify import Verdict, cases, check_rows, check_tokens, drafters_of
from paceline.bench.work import Counted, as_dict
from paceline.bench.work import tables as work_tables
from paceline.decoding.costs import CostTable
from paceline.models import Progress
from paceline.options import check
from paceline.runtime import Model


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
    tables = [_plan_table(f"{model.files.name} on this machine", here)]
    if measurement.deep_context:
        deep = here.behind(measurement.deep_context)
        value["deep"] = {
            "context": deep.context,
            "plain_milliseconds": deep(1) * 1e3,
            "rows": plan_rows(deep),
            "best": _best(deep),
        }
        tables.append(_plan_table(f"the same behind {deep.context} tokens", deep))
    other = "the ZAYA experiment (soft-routed MoE, Neural Engine)"
    if isinstance(model.engine, Counted):
        work = model.engine.work()
        value["work"] = as_dict(work)
        tables += work_tables(work)
    return Report(value, tables=[*tables, _plan_table(other, zaya)])


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
    title = f"{title}, plain {cost(1) * 1e3:.1f} ms a token"
    return title, ["rows", "ms", "/ plain", "break-even p", *chances], rows
