"""`plan`: what verification calls cost on this machine, and the speed-up drafting can give."""

from collections.abc import Mapping

from paceline.decoding.costs import CostTable
from paceline.engines.invariance import Compared
from paceline.runtime.model import Model
from paceline.storage.report import Report, Table
from paceline.tools.bench.plan import flops
from paceline.tools.bench.plan.table import ZAYA, best_by_chance, plan_rows


def plan(model: Model, *, again: bool) -> Report:
    """Cost table of this machine, work of a call by part, and the ZAYA experiment's cost table.

    The work is included only for engines that count it. With `again` the costs are measured anew.
    """
    measurement = model.measure_profile(again=again)
    here, zaya = measurement.cost, CostTable(ZAYA)
    value = {
        "model": model.files.name,
        "engine": model.engine.describe(),
        "context": measurement.context,
        "row_invariant": measurement.row_invariant,
        "exactness": {name: each.as_dict() for name, each in measurement.compared.items()},
        **_cost_facts(here),
        "zaya": _cost_facts(zaya),
    }
    tables = [_cost_table(f"{model.files.name} on this machine", here)]
    if measurement.deep_context:
        deep = here.at_context(measurement.deep_context)
        value["deep"] = {"context": deep.context, **_cost_facts(deep)}
        tables.append(_cost_table(f"the same at a context of {deep.context} tokens", deep))
    if isinstance(model.engine, flops.CountsWork):
        work = model.engine.work()
        value["work"] = flops.as_dict(work)
        tables += flops.tables(work)
    other = "the ZAYA experiment (soft-routed MoE, Neural Engine)"
    tables += [_cost_table(other, zaya), _exactness_table(measurement.compared)]
    return Report(value, tables=tables)


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
            str(each.rows),
            f"{each.differing} ({100 * each.differing / max(each.rows, 1):.0f} %)",
            f"{each.other_picks} ({100 * each.other_picks / max(each.rows, 1):.0f} %)",
            f"{each.largest_difference:.3g}",
        ]
        for name, each in compared.items()
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
    title = f"{title}, plain {cost(1) * 1e3:.1f} ms a token"
    return title, ["rows", "ms", "/ plain", "break-even p", *chances], rows
