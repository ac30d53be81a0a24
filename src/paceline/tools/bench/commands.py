"""What the commands `verify` and `plan` do; printing is the command line's."""

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import paceline
from paceline.decoding.costs import CostTable
from paceline.engines.invariance import Compared
from paceline.models import Progress
from paceline.runtime.model import Model
from paceline.runtime.options import check
from paceline.storage.report import Report, Table
from paceline.tools.bench.ab_test import called
from paceline.tools.bench.flops import Counted, as_dict
from paceline.tools.bench.flops import tables as work_tables
from paceline.tools.bench.plan import ZAYA, best_by_chance
from paceline.tools.bench.plan import plan as plan_rows
from paceline.tools.bench.resume import journal_of
from paceline.tools.bench.verify import Verdict, cases, check_rows, check_tokens, drafters_of
from paceline.tools.bench.verify_kept import verifying
from paceline.tools.suite import Suite, load_suite


def verify(
    load: Callable[[], Model],
    *,
    suite: Path | None,
    max_tokens: int,
    whole: bool,
    drafters: Sequence[str],
    progress: Progress,
    output: Path | None = None,
) -> Report:
    """Row invariance and token parity, with a verdict. `load` opens the model.

    `drafters` are those to check; none named: all that the model has. What has been checked is kept
    beside `output` until it is written, so that a stopped verification goes on where it was.

    Raises:
        InvalidRequest: the suite or a drafter cannot be used, or the journal is another's.
    """
    prompts = load_suite(suite)
    for name in drafters:
        check({"drafter": name})
    model = load()
    named = drafters or drafters_of(model)
    chosen = cases(whole=whole, chosen_from=named)
    about = {**_about(model, prompts), "max_tokens": max_tokens, "whole": whole}
    settings = {"drafters": [called(name) for name in named], "cases": len(chosen)}
    verdict = Verdict()
    fixed = {name: each for name, each in {**about, **settings}.items() if name != "date"}
    with verifying(output, fixed) as kept:
        with progress.task("comparing rows"):
            if kept.rows is None:
                check_rows(model.engine, verdict)
                kept.add_rows({name: asdict(each) for name, each in verdict.conditions.items()})
            else:
                verdict.take_rows(kept.rows)
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
                kept=kept,
            )
    rows = verdict.rows
    invariant = "are" if not rows.differing else "are NOT"
    lines = [
        f"rows: {rows.rows} compared, {rows.differing} differ"
        + (f" by up to {rows.largest_difference:.3g}" if rows.differing else ""),
        *(_condition_line(name, each) for name, each in verdict.conditions.items()),
        f"answers: {verdict.answers_compared} compared ({verdict.tokens_compared} tokens), "
        f"{len(verdict.answers_differing)} differ",
        *verdict.answers_differing[:10],
        f"verdict: {model.files.name} on the {model.engine.name} engine "
        f"{'is' if verdict.exact else 'is NOT'} exact here: rows {invariant} independent of how "
        "they are computed",
    ]
    value = {**about, "drafters": settings["drafters"], **verdict.as_dict()}
    return Report(value, verdict.exact, "\n".join(lines), journal=journal_of(output))


def _condition_line(name: str, found: Compared) -> str:
    rates = f"{found.differing} of {found.rows} differ"
    picks = f", {found.other_picks} pick another token" if found.differing else ""
    return f"  {name.replace('_', ' ')}: {rates}{picks}"


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
        "exactness": {name: each.as_dict() for name, each in measurement.compared.items()},
        "plain_milliseconds": here(1) * 1e3,
        "rows": plan_rows(here),
        "best": _best(here),
        "zaya": {"plain_milliseconds": zaya(1) * 1e3, "rows": plan_rows(zaya), "best": _best(zaya)},
    }
    tables = [_plan_table(f"{model.files.name} on this machine", here)]
    if measurement.deep_context:
        deep = here.at_context(measurement.deep_context)
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
    tables += [_plan_table(other, zaya), _exactness_table(measurement.compared)]
    return Report(value, tables=tables)


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


def _exactness_table(compared: Mapping[str, Compared]) -> Table:
    head = ["rows with another", "compared", "differ", "other picks", "largest difference"]
    rows = [
        [
            name.replace("_", " "),
            str(each.rows),
            f"{each.differing} ({100 * each.differing / max(each.rows, 1):.0f} %)",
            f"{each.other_picks} ({100 * each.other_picks / max(each.rows, 1):.0f} %)",
            f"{each.largest_difference:.3g}",
        ]
        for name, each in compared.items()
    ]
    return "exactness: rows against plain decoding's of a sequence alone, bit for bit", head, rows


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
