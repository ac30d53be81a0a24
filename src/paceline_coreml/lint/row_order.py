"""Rules about the order of rows: permuted heads and tokens, or mixed rows.

An attention output flattened as [head, token, dim] instead of [head, dim, token] is correct for one
row and wrong for more. So is a wrong split into heads, a sum over the wrong axis, or a trace with
one row. Rows may depend on other rows only through states and masks. These faults are thus found by
tracking the row axis through the program, from its inputs to its outputs, without running it.

This needs neither inputs nor time, names the operation, and is valid for every T and all weights.
It does not check the order of heads, or masks; `paceline coreml golden` does.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from paceline_coreml.lint.program import Program
from paceline_coreml.lint.row_tracker import RowEvent, RowTracker
from paceline_coreml.lint.rules import Fault, program_rule
from paceline_coreml.rehearsal.program import MilFunction

_ROW_AXES: Final[Mapping[str, tuple[int, ...]]] = {
    "hidden": (2,),
    "rope_cos": (0,),
    "rope_sin": (0,),
    "attn_mask": (2, 3),
    "kv_write_mask": (3,),
    "window_write": (3,),
    "window_read": (2,),
}
"""Row axes of the inputs of paceline's shards, for a package with one static function."""


@program_rule(
    "high", "the seed experiments, ane-book 26: heads and tokens permuted, invisible with one row"
)
def row_order(program: Program) -> Iterator[Fault]:
    """Keep rows separate from each other, heads and channels; T = 1 hides such faults."""
    yield from _of_kind(program, "mixed")
    tracker = _tracked(program).tracker
    if tracker is None:
        return
    for name in program.function.block.outputs:
        layout = tracker.layout(name)
        if layout is not None and any(axis.rows and not axis.rows_only for axis in layout.axes):
            yield Fault(name, f"is {layout}; expected an axis for the rows")


@program_rule("medium", "paceline: an untracked operation is not proven correct")
def row_order_unknown(program: Program) -> Iterator[Fault]:
    """Compare blocks with single rows (golden): rows could not be tracked through the program."""
    yield from _of_kind(program, "untracked")
    if not _tracked(program).known:
        yield Fault("", "the row axes of the inputs are unknown")


@program_rule(
    "high", "paceline: coremltools 9 does so for a select of two numbers; the emulator rejects it"
)
def declared_shape(program: Program) -> Iterator[Fault]:
    """Correct the declared shape, which differs from the operation's output."""
    yield from _of_kind(program, "wrong-shape")


class RowAxes(NamedTuple):
    axes: Mapping[str, Sequence[int]]
    """Row axes by input; empty if they are unknown."""
    number: int | None
    """T, if the function is for only one T."""


def row_axes_of(program: Program) -> RowAxes:
    """Determine the row axes of a function's inputs.

    They are the flexible axes, or the axes that differ between functions for different T. A package
    with one static function is assumed to have the inputs of paceline's shards.
    """
    function = program.function
    inputs = function.block.inputs
    if program.flexible:
        axes = {
            value.name: [n for n, size in enumerate(value.shape) if size is None]
            for value in inputs
        }
        return RowAxes(axes if len(_ranges(function)) == 1 else {}, None)
    others = [other for other in program.package.functions.values() if other.name != function.name]
    axes = _differing(function, others[0]) if others else _ours(function)
    sizes = {value.shape[axis] for value in inputs for axis in axes.get(value.name, ())}
    return RowAxes(axes, sizes.pop()) if len(sizes) == 1 else RowAxes({}, None)


def _ranges(function: MilFunction) -> set[tuple[int | None, ...]]:
    """Return the distinct length ranges of the flexible axes."""
    return {
        tuple(sorted({shape[axis] for shape in feature.choices}))
        if feature.choices
        else (feature.lower[axis], feature.upper[axis])
        for feature in function.inputs
        for axis in range(len(feature.shape))
        if feature.lower[axis] != feature.upper[axis]
        or len({shape[axis] for shape in feature.choices}) > 1
    }


def _differing(function: MilFunction, other: MilFunction) -> dict[str, list[int]]:
    theirs = {value.name: value.shape for value in other.block.inputs}
    return {
        value.name: [
            axis
            for axis, (size, length) in enumerate(zip(value.shape, theirs[value.name], strict=True))
            if size != length
        ]
        for value in function.block.inputs
        if len(theirs.get(value.name, ())) == len(value.shape)
    }


def _ours(function: MilFunction) -> dict[str, list[int]]:
    inputs = {value.name: value.shape for value in function.block.inputs}
    hidden = inputs.get("hidden", ())
    count = hidden[2] if len(hidden) == 4 else None
    return {
        name: [axis for axis in _ROW_AXES[name] if axis < len(shape) and shape[axis] == count]
        for name, shape in inputs.items()
        if name in _ROW_AXES
    }


class _Tracked(NamedTuple):
    events: Sequence[RowEvent]
    tracker: RowTracker | None
    """The tracker, or None if there are no rows to track."""
    known: bool
    """True if the row axes of the inputs are known."""


def _of_kind(program: Program, kind: str) -> Iterator[Fault]:
    events = _tracked(program).events
    return (Fault(event.where, event.what) for event in events if event.kind == kind)


@lru_cache(maxsize=1)
def _tracked(program: Program) -> _Tracked:
    """Track a program's rows; cached, because three rules use the result."""
    axes, number = row_axes_of(program)
    known = any(axes.values())
    if not known or number == 1:  # one row has no order
        return _Tracked((), None, known)
    tracker = RowTracker(program, axes, number)
    return _Tracked(list(tracker.run()), tracker, known)
