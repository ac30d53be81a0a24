"""Operations on states: what a model keeps between calls.

A state is replaced and never changed in place, so what was read of it before a write stays what it
was.
"""

from paceline.engines.coreml.rehearsal.ops.table import Array, Arrays, Cell, op


@op("read_state", moves=True)
def _read_state(input: Cell) -> Array:
    return input.array


@op("write_state", moves=True)
def _write_state(input: Cell, data: Array) -> Arrays:
    input.array = data
    return ()
