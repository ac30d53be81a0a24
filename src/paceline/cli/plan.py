"""`paceline plan`: forward-pass costs on this machine, and the possible speed-up by drafts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from paceline.cli.console import check_writable, load_model, print_report
from paceline.cli.options import ModelOptions, Output, ResultFile, command
from paceline.storage.report import Report, Table

if TYPE_CHECKING:
    from paceline.decoding.costs import CostTable
    from paceline.engines.exact import RowComparison
    from paceline.runtime.model import Model


_CHANCES = (0.3, 0.5, 0.7, 0.9, 1.0)
"""Probabilities that a draft token is accepted after those before it were."""

_LONG = 4096
"""Tokens of context of the second table, if the model's context is as long."""


@command(
    first=("model", "engine", "measure", "everything", "result", "json", "quiet"),
    examples=("paceline plan", "paceline plan -m qwen3-0.6b --measure"),
)
def plan(
    *,
    measure: Annotated[
        bool,
        Option("--measure", help="run forward passes to measure, in addition to those of answers"),
    ] = False,
    everything: Annotated[
        bool, Option("--all", help="also show long contexts and exactness")
    ] = False,
    result: ResultFile = None,
    model: ModelOptions,
    output: Output,
) -> int:
    """Show when speculation is faster on this machine.

    A call computes one or more rows: the last token, and drafted ones to verify. The table has
    the cost of a forward pass by rows, and the acceptance above which a block of that size is
    faster. Without earlier answers, forward passes are run to measure it.
    """
    check_writable(result)
    loaded = load_model(model, output)
    single = None
    if loaded.engine.min_rows > 1 and getattr(loaded.engine, "single_row_fault", None) == "":
        with load_model(model, output, min_rows=1) as other:
            single = other.measured_costs(again=measure)(1)
    report = costs_report(loaded, measure=measure, single=single)
    texts = [*filter(None, (report.text, _advice(report.value)))]
    if not everything:
        texts = [text.partition("\n")[0].rstrip(":") for text in texts]
        report = replace(report, tables=report.tables[:1])
    return print_report(replace(report, text="\n".join(texts)), output, result)


def costs_report(model: "Model", *, measure: bool, single: float | None = None) -> Report:
    """Return the learned forward-pass costs; `measure` runs additional passes for them.

    `single` is the time of a pass of one row that is not padded, if the engine has such passes:
    plain decoding is then the faster one.
    """
    cost, compared = model.measured_costs(again=measure), model.exactness_report()
    padded = cost(1)
    if single is not None:
        cost = replace(cost, seconds={**cost.seconds, 1: min(single, padded)})
    value = {
        "model": model.files.name,
        "engine": model.engine.describe(),
        "context": cost.context,
        "exactness": {name: comparison.as_dict() for name, comparison in compared.items()},
        **cost_facts(cost),
    }
    tables = [_cost_table(f"{model.files.name} on this machine", value)]
    deep = cost.at_context(min(_LONG, model.engine.context_length))
    if deep(1) > 1.01 * cost(1):  # else only one context length was measured
        value["deep"] = {"context": deep.context, **cost_facts(deep)}
        title = f"the same at a context of {deep.context} tokens"
        tables.append(_cost_table(title, value["deep"]))
    tables.append(_exactness_table(compared))
    # For an engine whose times are not those of its target hardware: the source of the times.
    remark = getattr(model.engine, "remark", "")
    value |= {"remark": remark} if remark else {}
    texts = [remark] if remark else []
    if single is not None:
        value["single_row_milliseconds"], value["padded_milliseconds"] = 1e3 * single, 1e3 * padded
        texts.append(
            f"Exactness costs {padded / single:.2f}x: a padded pass takes {1e3 * padded:.1f} ms, "
            f"one row alone (--min-rows 1) {1e3 * single:.1f} ms."
        )
    return Report(value, text=" ".join(texts), tables=tables)


def cost_facts(cost: "CostTable") -> dict[str, Any]:
    """Return, as JSON, costs and speed-ups of measured T > 1, and the best T by probability."""
    best = {str(chance): cost.best(chance) for chance in (0.1, *_CHANCES)}
    return {
        "plain_milliseconds": cost(1) * 1e3,
        "rows": [
            {
                "rows": rows,
                "milliseconds": cost(rows) * 1e3,
                "ratio": cost(rows) / cost(1),
                "break_even": cost.break_even(rows),
                "speed_up": {str(chance): cost.speed_up(rows, chance) for chance in _CHANCES},
            }
            for rows in cost.seconds
            if rows > 1
        ],
        "best": {chance: {"rows": rows, "speed_up": gain} for chance, (rows, gain) in best.items()},
    }


def _cost_table(title: str, facts: Mapping[str, Any]) -> Table:
    rows = [
        [
            str(row["rows"]),
            f"{row['milliseconds']:.1f}",
            f"{row['ratio']:.2f}",
            "never" if row["break_even"] is None else f"{row['break_even']:.2f}",
            *(f"{gain:.2f}" for gain in row["speed_up"].values()),
        ]
        for row in facts["rows"]
    ]
    head = ["rows", "ms", "/ plain", "break-even p", *(f"p={chance}" for chance in _CHANCES)]
    plain = f"plain {facts['plain_milliseconds']:.1f} ms per token"
    return f"{title}, {plain}; p=0.5: speed-up when half is accepted", head, rows


def _exactness_table(compared: Mapping[str, "RowComparison"]) -> Table:
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


def _advice(value: Mapping[str, Any]) -> str:
    """Return the conclusion from the tables, in two lines."""
    rows = value["rows"]
    pays = {row["break_even"]: row["rows"] for row in rows if row["break_even"] is not None}
    if not pays:
        return "Speculation cannot be faster: passes of several rows cost too much. --drafter none."
    lowest = min(pays)
    best = value["best"]["0.7"]
    return (
        f"Speculation is faster from {100 * lowest:.0f} % accepted, with blocks of "
        f"{pays[lowest]}; at 70 %, blocks of {best['rows']} have {best['speed_up']:.2f}x the speed "
        "of plain decoding.\nThere is nothing to set: --drafter auto drafts where that is faster."
    )
