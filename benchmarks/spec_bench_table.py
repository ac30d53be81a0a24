"""Tables of Spec-Bench in Markdown, from a record of `bench run --output`.

    python benchmarks/spec_bench_table.py benchmarks/results/spec-bench-120.json [--drafter auto]

Prints a short table with a column for each kind, then the tables of benchmarks/README.md.
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline_lab.bench.record import Record, read_record
from paceline_lab.bench.summary import group_tables, notes, summary


def main() -> None:
    """Read a record and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--drafter", default="auto", help="drafter of the short table")
    options = parser.parse_args()
    record = read_record(options.result)
    print(short_table(record, options.drafter))
    for title, head, rows in group_tables(record.rows):
        print(f"\n{title}\n")
        print(markdown(head, rows))
    print("", *notes(record.rows), sep="\n")


def short_table(record: Record, drafter: str) -> str:
    """Table with a column per kind. Raises SystemExit if the record lacks the drafter."""
    if drafter not in record.contenders:
        raise SystemExit(f"the record has no {drafter}; it has {', '.join(record.contenders)}")
    groups = summary(record.rows)["groups"]
    rows = [
        [what, *(_cell(group[which].get(drafter, {}), name) for group in groups.values())]
        for what, which, name in (
            ("tokens per step", "with_loops", "tokens_per_step"),
            ("speed over plain decoding", "with_loops", "ratio"),
            ("the same without the loops", "without_loops", "ratio"),
            ("over single-row decoding, which is not exact", "with_loops", "ratio_single_row"),
            ("the same without the loops", "without_loops", "ratio_single_row"),
        )
    ]
    loops = [f"{100 * each['loops'] / each['answers']:.0f} %" for each in groups.values()]
    return markdown(["", *groups], [*rows, ["answers that are loops", *loops]])


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(found: Mapping[str, Any], name: str) -> str:
    return f"{found[name]:.2f}" if name in found else "-"


if __name__ == "__main__":
    main()
