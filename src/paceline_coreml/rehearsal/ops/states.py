"""Operations on states, which a model keeps between forward passes.

A write replaces the array of a state, so values that were read before it do not change.
"""

from paceline_coreml.rehearsal.ops.table import Array, Arrays, Cell, op


@op("read_state", moves=True)
def _read_state(input: Cell) -> Array:
    return input.array


@op("write_state", moves=True)
def _write_state(input: Cell, data: Array) -> Arrays:
    input.array = data
    return ()
