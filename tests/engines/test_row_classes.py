"""Row classes, measured on a simulated runtime: each of its kernels rounds in its own way."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from paceline.decoding.types import Logits
from paceline.engines.row_classes import CANDIDATES, RowClasses, RowRange, keep, kept, measure

Kernel = Callable[[int, int], int]
"""(keys, rows of a call) -> number of the kernel that the call takes."""


class Simulated:
    """A prober whose rows depend on position, kernel, and on the kernels of all rows before."""

    def __init__(self, kernel: Kernel, room: int = 2000) -> None:
        self.room = room
        self._kernel = kernel
        self._kernels: list[int] = []

    def prefill(self, length: int, rows: RowRange) -> None:
        del self._kernels[length:]
        for part in rows.split(length - len(self._kernels)):
            count = max(part.stop - part.start, rows.least)
            kernel = self._kernel(len(self._kernels), count)
            self._kernels += [kernel] * (part.stop - part.start)

    def rows(self, length: int, count: int, outputs: int) -> Logits:
        del self._kernels[length:]
        kernel = self._kernel(length, count)
        logits = []
        for position in range(length, length + count):
            self._kernels.append(kernel)
            logits.append([position, kernel, hash(tuple(self._kernels)) % 1000])
        return np.array(logits[:outputs], np.float32)


def by_size(*starts: int) -> Kernel:
    """Kernels that begin at these numbers of rows."""
    return lambda keys, rows: sum(rows >= start for start in starts)


def always(keys: int) -> bool:
    return True


@pytest.mark.parametrize(
    ("starts", "decode", "prefill"),
    [
        ((), (2, 16), (32, 256)),
        ((2,), (2, 16), (32, 256)),
        ((32,), (2, 16), (32, 256)),
        ((2, 64), (2, 16), (64, 256)),
        ((8,), (2, 7), (8, 256)),
        ((8, 64), (2, 7), (64, 256)),
    ],
)
def test_the_cheapest_classes_whose_rows_are_equal_are_taken(starts, decode, prefill):
    classes = measure(Simulated(by_size(*starts)), CANDIDATES, always, 10.0)
    assert classes is not None
    assert (classes.decode, classes.prefill) == (decode, prefill)
    assert classes.single == (2 not in starts)


def test_a_model_whose_rows_depend_on_every_number_of_rows_has_no_class():
    assert measure(Simulated(lambda keys, rows: rows), CANDIDATES, always, 10.0) is None


def test_a_head_whose_single_row_differs_has_two_rows():
    class Head(Simulated):
        def rows(self, length: int, count: int, outputs: int) -> Logits:
            return super().rows(length, count, outputs) + (outputs == 1)

    assert measure(Head(by_size()), CANDIDATES, lambda keys: False, 10.0) is None
    two = [classes._replace(outputs=2) for classes in CANDIDATES]
    assert measure(Head(by_size()), two, lambda keys: False, 10.0) == two[0]


def test_a_single_row_that_differs_at_long_contexts_only_is_not_taken():
    def kernel(keys: int, rows: int) -> int:
        return int(keys > 500 and rows == 1)

    classes = measure(Simulated(kernel), CANDIDATES, always, 10.0)
    assert classes is not None and not classes.single


def test_a_single_row_is_measured_only_where_the_library_allows_it():
    def kernel(keys: int, rows: int) -> int:
        return int(keys > 500 and rows == 1)

    classes = measure(Simulated(kernel), CANDIDATES, lambda keys: keys < 500, 10.0)
    assert classes is not None and classes.single


def test_no_single_row_is_taken_that_was_not_measured():
    classes = measure(Simulated(by_size()), CANDIDATES, lambda keys: False, 10.0)
    assert classes is not None and not classes.single


def test_kept_classes_are_those_measured_and_a_damaged_file_is_none(tmp_path: Path):
    path = tmp_path / "folder" / "model.rows"
    assert kept(path) is None
    keep(path, classes := RowClasses(RowRange(2, 16), RowRange(64, 256), True, 2))
    assert kept(path) == classes
    for text in ("", "{}", "[]", '{"decode": 1, "prefill": [1, 2], "single": true}'):
        path.write_text(text)
        assert kept(path) is None


def test_every_candidate_divides_a_block_into_calls_of_its_class():
    for classes in CANDIDATES:
        for rows in (classes.decode, classes.prefill):
            for count in range(1, 600):
                parts = list(rows.split(count))
                assert sum(part.stop - part.start for part in parts) == count
                assert all(part.stop - part.start <= rows.most for part in parts)
