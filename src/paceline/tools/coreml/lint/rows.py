"""The rule about the order of heads and tokens, and what else is wrong with rows.

An attention's output flattened as [head, token, dim] instead of [head, dim, token] is right with
one row and wrong with more, and so is everything that takes heads apart in the wrong order, sums
over the wrong axis, or was traced with one row. Rows of other blocks come to a row through states
and masks alone; so these faults are found by following the axis of the rows through the program,
without running it: from the inputs, through every reshape, transpose and product, to the outputs.

Read off, rather than rehearsed with a row changed: it takes no inputs, whose meaning a program does
not say, and no time, however large the weights; it names the operation; and it holds for every T
and all weights. It does not show that heads are in the right order among themselves, or that a mask
is right: that is seen in numbers only, by `paceline coreml golden`.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

from paceline.engines.coreml.rehearsal.program import Function
from paceline.tools.coreml.lint.flow import Event, Flow
from paceline.tools.coreml.lint.program import Program
from paceline.tools.coreml.lint.rules import PROGRAM_RULES, Fault, rule

_ROW_AXES: Final[Mapping[str, tuple[int, ...]]] = {
    "hidden": (2,),
    "rope_cos": (0,),
    "rope_sin": (0,),
    "attn_mask": (2, 3),
    "kv_write_mask": (3,),
    "window_write": (3,),
    "window_read": (2,),
}
"""Where rows stand in the inputs of our shards, for a package that does not say it itself."""


@rule(
    PROGRAM_RULES,
    "row-order",
    "fail",
    "high",
    "the seed experiments, ane-book 26: heads and tokens permuted, invisible with one row",
)
def row_order(program: Program) -> Iterator[Fault]:
    """Rows are mixed with each other, or with heads and channels. Right with one row at most."""
    yield from _of_kind(program, "mixed")
    flow = _followed(program).flow
    if flow is None:
        return
    for name in program.function.block.outputs:
        layout = flow.layout(name)
        if layout is not None and any(axis.rows and not axis.alone for axis in layout.axes):
            yield Fault(name, f"gives {layout}; expected an axis for the rows")


@rule(
    PROGRAM_RULES,
    "row-order-unknown",
    "warn",
    "medium",
    "paceline: what is not followed is not proven",
)
def row_order_unknown(program: Program) -> Iterator[Fault]:
    """Whether rows stay apart could not be read off. Compare blocks with single rows (golden)."""
    yield from _of_kind(program, "unfollowed")
    if not _followed(program).known:
        yield Fault("", "no axis of the inputs is known to be that of the rows")


@rule(
    PROGRAM_RULES,
    "declared-shape",
    "fail",
    "high",
    "paceline: coremltools 9 says so of a choice between two numbers; the rehearsal stops there",
)
def declared_shape(program: Program) -> Iterator[Fault]:
    """An operation makes another shape than the program says."""
    yield from _of_kind(program, "misdeclared")


class Rows(NamedTuple):
    """Where the rows of a call are in the inputs of a function."""

    axes: Mapping[str, Sequence[int]]
    """Of each input; empty: it is not known."""
    number: int | None
    """T, where the function is for one T only."""


def rows_of(program: Program) -> Rows:
    """What a package says of where rows are.

    Flexible axes are those of the rows. Between functions for several T, the axes of the rows are
    what differs; a function alone has them where our shards do.
    """
    function = program.function
    inputs = function.block.inputs
    if program.flexible:
        axes = {one.name: [n for n, size in enumerate(one.shape) if size is None] for one in inputs}
        return Rows(axes if len(_ranges(function)) == 1 else {}, None)
    others = [one for one in program.package.functions.values() if one.name != function.name]
    axes = _differing(function, others[0]) if others else _ours(function)
    sizes = {one.shape[axis] for one in inputs for axis in axes.get(one.name, ())}
    return Rows(axes, sizes.pop()) if len(sizes) == 1 else Rows({}, None)


def _ranges(function: Function) -> set[tuple[int | None, ...]]:
    """The lengths that flexible axes may have, each once."""
    return {
        tuple(sorted({shape[axis] for shape in one.choices}))
        if one.choices
        else (one.lower[axis], one.upper[axis])
        for one in function.inputs
        for axis in range(len(one.shape))
        if one.lower[axis] != one.upper[axis] or len({shape[axis] for shape in one.choices}) > 1
    }


def _differing(function: Function, other: Function) -> dict[str, list[int]]:
    theirs = {one.name: one.shape for one in other.block.inputs}
    return {
        one.name: [
            axis
            for axis, (size, length) in enumerate(zip(one.shape, theirs[one.name], strict=True))
            if size != length
        ]
        for one in function.block.inputs
        if len(theirs.get(one.name, ())) == len(one.shape)
    }


def _ours(function: Function) -> dict[str, list[int]]:
    inputs = {one.name: one.shape for one in function.block.inputs}
    hidden = inputs.get("hidden", ())
    count = hidden[2] if len(hidden) == 4 else None
    return {
        name: [axis for axis in _ROW_AXES[name] if axis < len(shape) and shape[axis] == count]
        for name, shape in inputs.items()
        if name in _ROW_AXES
    }


class _Followed(NamedTuple):
    events: Sequence[Event]
    flow: Flow | None
    """None: there are no rows to follow."""
    known: bool
    """Whether it is known where rows are."""


def _of_kind(program: Program, kind: str) -> Iterator[Fault]:
    events = _followed(program).events
    return (Fault(one.where, one.what) for one in events if one.kind == kind)


@lru_cache(maxsize=1)
def _followed(program: Program) -> _Followed:
    """What happens to a program's rows; three rules ask, one after the other."""
    axes, number = rows_of(program)
    known = any(axes.values())
    if not known or number == 1:  # with one row there is no order
        return _Followed((), None, known)
    flow = Flow(program, axes, number)
    return _Followed(list(flow.run()), flow, known)
