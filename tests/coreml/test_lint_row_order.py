"""Orders of rows: faults that T = 1 hides, planted in a model, and the layouts that find them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline_coreml.conversion.families import open_family
from paceline_coreml.conversion.layers import Attention, ConvState, LayerInputs, RMSNorm
from paceline_coreml.conversion.shards import ShardSizes, convert_layers
from paceline_coreml.lint import Finding, lint
from paceline_coreml.lint.program import Program
from paceline_coreml.lint.row_layout import (
    ONE,
    Axis,
    Layout,
    RowsMixed,
    broadcast,
    check_contraction,
    check_normalized,
    reduce_axes,
    without_rows,
)
from paceline_coreml.lint.row_layout import ROWS as ROW
from paceline_coreml.lint.row_order import RowTracker, row_axes_of
from paceline_coreml.rehearsal import RehearsalModel
from paceline_coreml.rehearsal.program import read_package
from support import mil
from support.coreml_checkpoints import tiny_checkpoint

pytestmark = pytest.mark.coreml

ROWS, SLOTS, CONV_SLOTS = 4, 32, 8
SIZES = ShardSizes(ROWS, SLOTS, CONV_SLOTS)


# --- faults


def heads_after_tokens(self: Attention, q: Any, k: Any, v: Any, inputs: LayerInputs) -> Any:
    """[head, token, dim] becomes channels."""
    made = _attention(self, q, k, v, inputs)
    heads = made.reshape(1, self.heads, self.head_dim, -1)
    return heads.transpose(2, 3).reshape(1, self.heads * self.head_dim, -1, 1)


def values_by_tokens(self: Attention, q: Any, k: Any, v: Any) -> tuple[Any, ...]:
    """Queries and keys are right; values, which get no RoPE, are wrong."""
    q, k, _ = _by_head(self, q, k, v)
    return q, k, v.reshape(1, self.kv_heads, -1, self.head_dim).transpose(2, 3)


def norm_of_rows(self: RMSNorm, x: Any) -> Any:
    """A mean over the rows; of one row it is the row itself."""
    return x * torch.rsqrt((x * x).mean(2, keepdim=True) + 1e-3) * self.weight


def first_row_for_all(self: Attention, q: Any, k: Any, v: Any, inputs: LayerInputs) -> Any:
    """All rows get the first row's queries."""
    return _attention(self, q[..., :1] + 0 * q, k, v, inputs)


def channels_of_rows(self: ConvState, x: Any, inputs: LayerInputs, lags: int) -> Any:
    """Swaps rows and channels of a short convolution's state."""
    channels = x.shape[1]
    return _conv_state(self, x.reshape(1, -1, channels, 1).permute(0, 2, 1, 3), inputs, lags)


_attention, _by_head, _conv_state = Attention.forward, Attention.by_head, ConvState.forward

FAULTS: dict[str, tuple[type, str, Callable[..., Any], str, str]] = {
    "heads after tokens": (Attention, "forward", heads_after_tokens, "llama", "reshape"),
    "values by tokens": (Attention, "by_head", values_by_tokens, "llama", "reshape"),
    "a norm of rows": (RMSNorm, "forward", norm_of_rows, "llama", "mul"),
    "the first row for all": (Attention, "forward", first_row_for_all, "llama", "add"),
    "channels for rows": (ConvState, "forward", channels_of_rows, "lfm2", "reshape"),
}


def named(path: Path, *rules: str) -> list[Finding]:
    return [one for one in lint(path) if one.rule in rules]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_invisible_in_a_single_row_is_detected(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    place, method, wrong, model, kind = FAULTS[fault]
    monkeypatch.setattr(place, method, wrong)
    checkpoint = tiny_checkpoint(tmp_path / "checkpoint", model)
    family = open_family(checkpoint, slots=SLOTS, conv_slots=CONV_SLOTS)
    path = tmp_path / "model.mlpackage"
    convert_layers(family, 0, 1, sizes=SIZES).save(str(path))
    found = named(path, "row-order")
    assert found
    assert {one.verdict for one in found} == {"fail"}
    ops = {op.name: op.type for op in read_package(path).function().block.ops}
    assert ops[found[0].where] == kind
    assert found[0].what.startswith(kind)


# --- one operation at a time


def moves(mb: Any, x: Any, table: Any) -> dict[str, Any]:
    """Operations on x [1, 12, T, 1] and table [T, 4] that move whole elements."""
    by_head = mb.reshape(x=x, shape=[1, 3, 4, -1])
    rows_first = mb.transpose(x=by_head, perm=[0, 3, 1, 2])
    merged = mb.reshape(x=mb.transpose(x=by_head, perm=[0, 1, 3, 2]), shape=[1, -1, 4])
    transposed = mb.transpose(x=table, perm=[1, 0])
    return {
        "by_head": by_head,
        "rows_first": rows_first,
        "merged": merged,
        "taken_apart": mb.reshape(x=merged, shape=[1, 3, -1, 4]),
        "expanded": mb.expand_dims(x=table, axes=[0, -1]),
        "squeezed": mb.squeeze(x=x, axes=[0, 3]),
        "all_squeezed": mb.squeeze(x=mb.reshape(x=x, shape=[1, 12, -1, 1, 1])),
        "joined": mb.concat(values=[x, x], axis=1),
        "part": mb.split(x=by_head, axis=2, split_sizes=[1, 3])[1],
        "tiled": mb.tile(x=merged, reps=[2, 1, 3]),
        "rows_tiled": mb.tile(x=table, reps=[2, 1]),
        "slice": mb.slice_by_index(
            x=by_head, begin=[0, 1, 0, 0], end=[1, 2, 3, 0], stride=[1, 1, 2, 1],
            begin_mask=[True, False, False, True], end_mask=[True, False, False, True],
            squeeze_mask=[False, True, False, False],
        ),
        "spread": mb.maximum(x=by_head, y=transposed),
        "largest": mb.reduce_max(x=by_head, axes=[1, 2], keep_dims=False),
        "kept_largest": mb.reduce_max(x=by_head, axes=[1], keep_dims=True),
        "absolute": mb.abs(x=merged),
    }  # fmt: skip


def test_tracked_rows_match_the_emulator(tmp_path: Path):
    names: dict[str, str] = {}

    def build(mb: Any, x: Any, table: Any) -> list[Any]:
        made = moves(mb, x, table)
        names.update({one.name: what for what, one in made.items()})
        return list(made.values())

    inputs = {"x": np.zeros((1, 12, 1, 1), np.float16), "table": np.zeros((1, 4), np.float16)}
    path = mil.save_program(
        tmp_path / "moves.mlpackage", build, inputs, flexible={"x": 2, "table": 0}, rows=8
    )
    model = RehearsalModel(path)
    tracker = RowTracker(
        Program(model.package, model.function), *row_axes_of(Program(model.package, model.function))
    )
    events = [fault.what for _, fault in tracker.run()]  # only of outputs with merged axes
    assert all(what.endswith("expected an axis for the rows") for what in events)
    rows = np.arange(7, dtype=np.float32)
    found = model.predict(
        {
            "x": np.broadcast_to(rows[:, None], (1, 12, 7, 1)),
            "table": np.broadcast_to(rows[:, None], (7, 4)),
        }
    )
    assert set(found) == set(names)
    for name, numbers in found.items():
        layout = tracker.layouts[name]
        assert layout is not None, names[name]
        np.testing.assert_array_equal(numbers, marked(layout, 7), names[name])


def attend(mb: Any, query: Any, key: Any, value: Any) -> Any:
    """Attention among the rows of [1, 16, T, 1]."""
    q, k, v = (
        mb.transpose(x=mb.reshape(x=x, shape=[1, 2, 8, -1]), perm=[0, 1, 3, 2])
        for x in (query, key, value)
    )
    return mb.matmul(x=mb.softmax(x=mb.matmul(x=q, y=k, transpose_y=True)), y=v)


ONE_OPERATION: dict[str, tuple[Callable[..., Any], str | None]] = {
    "rows of a text that see each other": (lambda mb, x: attend(mb, x, x, x), None),
    "a window of rows": (
        lambda mb, x: mb.conv(
            x=x, weight=np.ones((16, 16, 3, 1), np.float16), pad_type="custom", pad=[2, 0, 0, 0]
        ),
        "row-order-unknown",
    ),
    "channels of merged rows": (
        lambda mb, x: mb.conv(
            x=mb.reshape(x=mb.transpose(x=x, perm=[0, 2, 1, 3]), shape=[1, -1, 1, 1]),
            weight=np.ones((4, 16, 1, 1), np.float16),
            pad_type="valid",
        ),
        "row-order",
    ),
    "rows beside others": (lambda mb, x: mb.concat(values=[x, x], axis=2), "row-order"),
    "some of the rows": (
        lambda mb, x: mb.slice_by_index(
            x=x, begin=[0, 0, 1, 0], end=[1, 16, 3, 1], end_mask=[True, True, False, True]
        ),
        "row-order-unknown",
    ),
}


@pytest.mark.parametrize("what", ONE_OPERATION)
def test_a_single_operation_is_checked(what: str, tmp_path: Path):
    build, expected = ONE_OPERATION[what]
    inputs = {"x": np.zeros((1, 16, 1, 1), np.float16)}
    path = mil.save_program(
        tmp_path / "model.mlpackage",
        lambda mb, x: [build(mb, x), mb.abs(x=x)],
        inputs,
        flexible={"x": 2},
    )
    found = {one.rule for one in named(path, "row-order", "row-order-unknown", "declared-shape")}
    assert found == ({expected} if expected else set())


# --- layouts


def marked(layout: Layout, rows: int) -> np.ndarray:
    """An array of the layout whose elements are their rows; 0 without rows."""
    shape = [axis.before * (rows if axis.rows else 1) * axis.after for axis in layout.axes]
    result = np.zeros(shape, np.int64)
    for number, axis in enumerate(layout.axes):
        if axis.rows:
            along = np.arange(shape[number]) // axis.after % rows
            result += along.reshape([-1 if n == number else 1 for n in range(len(shape))])
    return result


HEADS, DIM = Axis(4), Axis(16)


def of(*axes: Axis) -> Layout:
    return Layout(axes)


HIDDEN, MASK = of(ONE, Axis(64), ROW, ONE), of(ONE, ONE, Axis(8), ROW)


def test_a_row_may_combine_with_itself_and_with_rowless_values():
    table = without_rows((1, 1, 4, 1), constant=True)
    for other in (without_rows((1, 64, 1, 1)), of(ROW, ONE), table):
        assert broadcast([HIDDEN, other], 4) == HIDDEN
    # A value of all rows may be stored.
    kept = reduce_axes(MASK, [-1], keep=True)
    assert broadcast([without_rows((), constant=True), kept], None).from_many_rows
    check_contraction(ROW, ROW)
    check_contraction(DIM, DIM)
    scores = of(ONE, HEADS, ROW, ROW)
    assert check_normalized(HIDDEN, [1]) == HIDDEN
    assert check_normalized(scores, [-1]) == scores


@pytest.mark.parametrize(
    "mixing",
    [
        lambda: broadcast([HIDDEN, of(Axis(4, True), ONE)], None),
        lambda: broadcast([HIDDEN, without_rows((1, 1, 4, 1), constant=True)], 3),
        lambda: broadcast([HIDDEN, without_rows((1, 1, 4, 1))], 4),
        lambda: broadcast([HIDDEN, reduce_axes(HIDDEN, [2], keep=True)], None),
        lambda: check_contraction(ROW, DIM),
        lambda: check_contraction(Axis(1, True, 4), Axis(4, True)),
        lambda: check_normalized(HIDDEN, [1, 2]),
        lambda: check_normalized(of(ONE, Axis(8, True)), [1]),
    ],
)
def test_other_combinations_mix_rows(mixing: Callable[[], object]):
    with pytest.raises(RowsMixed):
        mixing()
