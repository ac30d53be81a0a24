"""A table in Markdown of records of `bench peers --output`, a row for each contender.

    python benchmarks/peers_table.py benchmarks/results/peers-smollm2.json ...

Speeds are medians over the answers of decode speed over the record's reference (llama-server's
plain decoding, if it took part), in brackets without the answers that are loops.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from paceline_lab.bench.record import Record, read_record
from paceline_lab.peers.summary import speeds


def main() -> None:
    """Read records and print their table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("results", type=Path, nargs="+")
    records = [read_record(path) for path in parser.parse_args().results]
    print("\n".join(f"| {' | '.join(cells)} |" for cells in table(records)))


def table(records: list[Record]) -> Iterator[list[str]]:
    """Head, rule and rows; of every record tokens/s, median, least and changed texts."""
    figures = [speeds(record.rows) for record in records]
    names = [Path(record.model["name"]).stem if record.model else "" for record in records]
    columns = ("tokens/s", "median", "least", "texts changed")
    head = ["", *(f"{name}: {column}" for name in names for column in columns)]
    yield head
    yield ["---"] * len(head)
    contenders = dict.fromkeys(name for each in figures for name in each["contenders"])
    for contender in contenders:
        cells = [contender]
        for record_figures in figures:
            own = record_figures["contenders"].get(contender)
            over, rest = (
                (own["over_reference"], own["without_loops"]) if own is not None else ({}, {})
            )
            cells += [
                f"{own['tokens_per_second']:.1f}" if own and "tokens_per_second" in own else "-",
                *(
                    f"{over[key]:.2f} ({rest[key]:.2f})" if rest else "-"
                    for key in ("median", "least")
                ),
                f"{own['texts_changed']} of {own['answers']}" if own else "-",
            ]
        yield cells


if __name__ == "__main__":
    main()
