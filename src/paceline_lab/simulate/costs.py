"""Cost tables for a simulation: measured on this machine, published elsewhere, or listed."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.decoding.costs import CostTable
from paceline.errors import InvalidRequest

HERE = "here"

ZAYA = {1: 0.112, 4: 0.499}
"""Rows -> seconds per forward pass of the 8B soft-routed MoE model on the Apple Neural Engine. Its
authors measured it (the ZAYA experiment): a pass of four rows costs more than four of one row."""

PHI_4_MINI = {1: 1 / 17.8, 4: 4 / 68.7}
"""Rows -> seconds per forward pass of Phi-4-mini in INT8 on the Apple Neural Engine: decode ran at
17.8 tokens/s, prefill with four rows per pass at 68.7 (the multi-token verifier experiment).
Prefill needs no head for most rows; verifying four rows costs slightly more."""

M5_MAX = {1: 0.0307, 4: 0.0394, 8: 0.0757}
"""Rows -> seconds per forward pass of Qwen 3.8 27B in 4 bits by MLX on an Apple M5 Max, warm: up to
four rows read the weights once, eight do not (github.com/lablup/mlxcel, #1182)."""

PRESETS = {"zaya": ZAYA, "phi-4-mini": PHI_4_MINI, "m5-max": M5_MAX}


@dataclass(frozen=True, slots=True)
class SourcedCosts:
    name: str
    table: CostTable

    def as_dict(self) -> dict[str, Any]:
        table = self.table
        facts = {
            "name": self.name,
            "milliseconds": {str(rows): cost * 1e3 for rows, cost in table.seconds.items()},
            "context": table.context,
        }
        if table.per_token:
            per_token = {str(rows): cost * 1e3 for rows, cost in table.per_token.items()}
            facts["milliseconds_per_token_of_context"] = per_token
        return facts


def parse_costs(spec: str, here: Callable[[], CostTable]) -> SourcedCosts:
    """Parse the option `--cost`.

    `spec` is `here` (the result of `here`), the name of a preset, or milliseconds by rows such as
    `1=12,4=12.6,8=15.4`. Raises InvalidRequest if it is none of these.
    """
    if spec == HERE:
        return SourcedCosts(HERE, here())
    if spec in PRESETS:
        return SourcedCosts(spec, CostTable(PRESETS[spec]))
    try:
        pairs = [part.split("=") for part in spec.split(",")]
        listed = CostTable({int(rows): float(cost) / 1e3 for rows, cost in pairs})
    except ValueError:
        raise InvalidRequest(
            f"--cost is {spec!r}; expected {HERE}, {', '.join(PRESETS)}, or milliseconds by rows, "
            "as in 1=12,4=12.6,8=15.4"
        ) from None
    return SourcedCosts("given", listed)
