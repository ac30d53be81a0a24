"""`plan`: what verification calls cost on this machine, and the speed-up drafting can give.

c(T) is the seconds of a call of T rows, p the probability that a draft token is accepted after
those before it were. A block of T rows brings 1 + p + ... + p^(T-1) tokens on average.
"""

from collections.abc import Mapping
from typing import Any

from paceline.decoding.costs import CostTable
from paceline.engines.exact import Compared
from paceline.runtime.model import Model
from paceline.storage.report import Report, Table

_CHANCES = (0.3, 0.5, 0.7, 0.9)

_LONG = 4096
"""Tokens of context of the second table, if the model has so many."""


def plan(model: Model, *, measure: bool) -> Report:
    """What was learnt of this machine's costs; with `measure` from calls that are made now, too."""
    cost, compared = model.measured_costs(again=measure), model.compared()
    value = {
        "model": model.files.name,
        "engine": model.engine.describe(),
        "context": cost.context,
        "exactness": {name: comparison.as_dict() for name, comparison in compared.items()},
        **_cost_facts(cost),
    }
    tables = [_cost_table(f"{model.files.name} on this machine", cost)]
    deep = cost.at_context(min(_LONG, model.engine.context_length))
    if deep(1) > 1.01 * cost(1):  # else calls at one context alone were seen
        value["deep"] = {"context": deep.context, **_cost_facts(deep)}
        tables.append(_cost_table(f"the same at a context of {deep.context} tokens", deep))
    tables.append(_exactness_table(compared))
    # Of an engine whose times are not those of the hardware that it is for: where they come from.
    remark = getattr(model.engine, "remark", "")
    value |= {"remark": remark} if remark else {}
    return Report(value, text=remark, tables=tables)


def _cost_facts(cost: CostTable) -> dict[str, object]:
    best = best_by_chance(cost)
    return {
        "plain_milliseconds": cost(1) * 1e3,
        "rows": plan_rows(cost),
        "best": {str(p): {"rows": rows, "speed_up": gain} for p, (rows, gain) in best.items()},
    }


def _exactness_table(compared: Mapping[str, Compared]) -> Table:
    head = ["rows with another", "compared", "differ", "other picks", "largest difference"]
    rows = [
        [
            name.replace("_", " "),
            str(counts.rows),
            f"{counts.differing} ({100 * counts.differing / max(counts.rows, 1):.0f} %)",
            f"{counts.other_picks} ({100 * counts.other_picks / max(counts.rows, 1):.0f} %)",
            f"{counts.largest_difference:.3g}",
        ]
        for name, counts in compared.items()
    ]
    return "exactness: rows against plain decoding's of a sequence alone, bit for bit", head, rows


def _cost_table(title: str, cost: CostTable) -> Table:
    planned = plan_rows(cost)
    rows = [
        [
            str(row["rows"]),
            f"{row['milliseconds']:.1f}",
            f"{row['ratio']:.2f}",
            "never" if row["break_even"] is None else f"{row['break_even']:.2f}",
            *(f"{gain:.2f}" for gain in row["speed_up"].values()),
        ]
        for row in planned
    ]
    chances = [f"p={chance}" for chance in planned[0]["speed_up"]]
    title += f", plain {cost(1) * 1e3:.1f} ms a token; p=0.5: speed-up when half is accepted"
    return title, ["rows", "ms", "/ plain", "break-even p", *chances], rows


def speed_up(cost: CostTable, rows: int, chance: float) -> float:
    """Tokens per second over those of plain decoding: (1 + p + ... + p^(T-1)) c(1) / c(T)."""
    return sum(chance**at for at in range(rows)) * cost(1) / cost(rows)


def break_even(cost: CostTable, rows: int) -> float | None:
    """The p at which `speed_up` is 1, by bisection; None: it is less even at p = 1."""
    if speed_up(cost, rows, 1.0) < 1:
        return None
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        if speed_up(cost, rows, middle) < 1:
            low = middle
        else:
            high = middle
    return high


def plan_rows(cost: CostTable) -> list[dict[str, Any]]:
    """For every measured T > 1: cost, ratio to plain decoding, break-even and speed-ups.

    `break_even` is the acceptance chance per draft token at which a block of T is as fast as plain
    decoding; None if a chance of 1 is slower. `speed_up` maps chances to speed over plain decoding.
    """
    return [
        {
            "rows": rows,
            "milliseconds": cost(rows) * 1e3,
            "ratio": cost(rows) / cost(1),
            "break_even": break_even(cost, rows),
            "speed_up": {str(chance): speed_up(cost, rows, chance) for chance in (*_CHANCES, 1.0)},
        }
        for rows in cost.seconds
        if rows > 1
    ]


def best(cost: CostTable, chance: float) -> tuple[int, float]:
    """(T, speed-up) with the largest speed-up at this chance per draft token; T = 1: no draft."""
    options = {rows: speed_up(cost, rows, chance) for rows in (1, *cost.seconds)}
    rows = max(options, key=lambda count: options[count])
    return rows, options[rows]


def best_by_chance(cost: CostTable) -> Mapping[float, tuple[int, float]]:
    """`best` for several chances up to 1."""
    return {chance: best(cost, chance) for chance in (0.1, *_CHANCES, 1.0)}
