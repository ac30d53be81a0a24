"""Cost tables for a simulation: measured here, recorded or published elsewhere, or listed."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from paceline.decoding.costs import CostTable
from paceline.errors import InvalidRequest
from paceline.storage.validation import Count, Limit, Positive, validated

HERE = "here"

ZAYA = {1: 0.112, 4: 0.499}
"""Rows -> seconds of a call of the 8B soft-routed MoE model on the Apple Neural Engine, measured by
its authors (the ZAYA experiment): a call of four rows costs more than four calls of one."""

PHI_4_MINI = {1: 1 / 17.8, 4: 4 / 68.7}
"""Rows -> seconds of a call of Phi-4-mini in INT8 on the Apple Neural Engine: decode ran at 17.8
tokens/s, prefill with four rows per call at 68.7 (the multi-token verifier experiment). Prefill
needs no head for most rows: a call that verifies four rows costs a little more than this."""

M5_MAX = {1: 0.0307, 4: 0.0394, 8: 0.0757}
"""Rows -> seconds of a call of Qwen 3.8 27B in 4 bits by MLX on an Apple M5 Max, warm: up to four
rows share the reading of the weights, eight do not (github.com/lablup/mlxcel, #1182)."""

PRESETS = {"zaya": ZAYA, "phi-4-mini": PHI_4_MINI, "m5-max": M5_MAX}


@dataclass(frozen=True, slots=True)
class SourcedCosts:
    name: str
    table: CostTable


_Milliseconds = Annotated[float, Limit(gt=0)]


@dataclass(frozen=True, slots=True)
class _Row:
    rows: Positive
    milliseconds: _Milliseconds


@dataclass(frozen=True, slots=True)
class _Calls:
    plain_milliseconds: _Milliseconds
    rows: list[_Row]
    context: Count = 0

    @property
    def seconds(self) -> dict[int, float]:
        """Rows -> seconds of a call."""
        blocks = {row.rows: row.milliseconds / 1e3 for row in self.rows}
        return {1: self.plain_milliseconds / 1e3, **blocks}


@dataclass(frozen=True, slots=True)
class _Plan(_Calls):
    """What is read of a recorded `paceline plan`."""

    deep: _Calls | None = None


def parse_costs(spec: str, here: Callable[[], CostTable]) -> SourcedCosts:
    """Parse the option `--cost`.

    `spec` is `here` (the result of `here`), the name of a preset, the file of a recorded `paceline
    plan`, or milliseconds by rows such as `1=12,4=12.6,8=15.4`. Raises InvalidRequest if it is
    none of these.
    """
    if spec == HERE:
        return SourcedCosts(HERE, here())
    if spec in PRESETS:
        return SourcedCosts(spec, CostTable(PRESETS[spec]))
    if "=" in spec and not Path(spec).exists():
        return SourcedCosts("given", _given(spec))
    return SourcedCosts(Path(spec).name, _recorded(Path(spec)))


def _given(spec: str) -> CostTable:
    try:
        pairs = [part.split("=") for part in spec.split(",")]
        return CostTable({int(rows): float(cost) / 1e3 for rows, cost in pairs})
    except ValueError:
        raise InvalidRequest(
            f"--cost is {spec!r}; expected milliseconds by rows, as in 1=12,4=12.6,8=15.4"
        ) from None


def _recorded(path: Path) -> CostTable:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise InvalidRequest(
            f"--cost is {path}, which cannot be read ({error.strerror}); expected {HERE}, "
            f"{', '.join(PRESETS)}, milliseconds by rows, or the file of a recorded plan"
        ) from error
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not JSON: {error}") from error
    plan = validated(_Plan, value, f"{path}, read as a recorded `paceline plan`")
    near, deep = plan.seconds, plan.deep
    if deep is None:
        return CostTable(near, plan.context)
    far, further = deep.seconds, deep.context - plan.context
    if further < 1 or far.keys() != near.keys():
        raise InvalidRequest(f"{path}: deep: expected the same rows at a longer context")
    grows = {rows: max(far[rows] - near[rows], 0.0) / further for rows in near}
    return CostTable(near, plan.context, grows)
