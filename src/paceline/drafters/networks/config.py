"""Fields that the config.json of every network has in common, for `storage.validation`."""

from dataclasses import dataclass
from typing import Annotated, Literal

from paceline.storage.validation import Limit

PositiveFloat = Annotated[float, Limit(gt=0)]
One = Annotated[float, Limit(ge=1, le=1)]
HeadDim = Annotated[int, Limit(ge=2, multiple_of=2)]


@dataclass
class Rope:
    """`rope_parameters` of transformers 5, or `rope_scaling` of transformers 4."""

    rope_type: Literal["default"] | None = None
    type: Literal["default"] | None = None
    rope_theta: PositiveFloat | None = None
    partial_rotary_factor: One = 1.0
