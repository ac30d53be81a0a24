"""`paceline plan`."""

from collections.abc import Mapping
from typing import Annotated, Any

from typer import Option

from paceline.cli.console import check_writable, load_model, print_report
from paceline.cli.options import ModelOptions, Output, ResultFile, command, group

app = group()


@command(
    app,
    first=("model", "engine", "measure", "everything", "result", "json", "quiet"),
    examples=("paceline plan", "paceline plan -m qwen3-0.6b --measure"),
)
def plan(
    *,
    measure: Annotated[
        bool, Option("--measure", help="make calls to learn from, besides those of answers")
    ] = False,
    everything: Annotated[bool, Option("--all", help="also long contexts, and exactness")] = False,
    result: ResultFile = None,
    model: ModelOptions,
    output: Output,
) -> int:
    """Show when drafting pays here, as answers have shown it.

    A call computes one or more rows: the last token, and drafted ones to verify. The table has
    the cost of a call by rows, and the acceptance from which a block of so many rows pays. If no
    answer was given yet, calls are made for it.
    """
    from dataclasses import replace

    from paceline.plan import plan as run

    check_writable(result)
    report = run(load_model(model, output), measure=measure)
    texts = [*filter(None, (report.text, _advice(report.value)))]
    if not everything:
        texts = [text.partition("\n")[0].rstrip(":") for text in texts]
        report = replace(report, tables=report.tables[:1])
    return print_report(replace(report, text="\n".join(texts)), output, result)


def _advice(value: Mapping[str, Any]) -> str:
    """What the tables say, in two lines."""
    rows = value["rows"]
    pays = {row["break_even"]: row["rows"] for row in rows if row["break_even"] is not None}
    if not pays:
        return "Drafting cannot pay here: a call of several rows costs too much. --drafter none."
    lowest = min(pays)
    best = value["best"]["0.7"]
    return (
        f"Drafting pays here from {100 * lowest:.0f} % accepted, with blocks of {pays[lowest]}; at "
        f"70 %, blocks of {best['rows']} are {best['speed_up']:.2f} times as fast as plain "
        "decoding.\nNothing is to be set: --drafter auto drafts where it pays."
    )
