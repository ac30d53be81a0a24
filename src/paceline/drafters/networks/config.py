"""Fields that the config.json of every network has in common, for `storage.validation`."""

from dataclasses import dataclass, fields
from typing import Annotated, Literal

from paceline.drafters.networks.rope import Llama3Rope
from paceline.storage.validation import Limit, Positive

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


@dataclass
class ScalableRope:
    """The same, for networks that may have Llama 3.1's scaling."""

    rope_type: Literal["default", "llama3"] | None = None
    type: Literal["default", "llama3"] | None = None
    rope_theta: PositiveFloat | None = None
    partial_rotary_factor: One = 1.0
    factor: Annotated[float, Limit(ge=1)] | None = None
    low_freq_factor: PositiveFloat | None = None
    high_freq_factor: PositiveFloat | None = None
    original_max_position_embeddings: Positive | None = None

    @property
    def llama3(self) -> Llama3Rope | None:
        """Its scaling; None: plain RoPE.

        Raises ValueError, with what is wrong, if a value is missing or the bounds are reversed.
        """
        if "llama3" not in (self.rope_type, self.type):
            return None
        names = [field.name for field in fields(Llama3Rope)]
        values = {name: getattr(self, name) for name in names}
        if missing := [name for name, value in values.items() if value is None]:
            raise ValueError(f"RoPE of type llama3 without {', '.join(missing)}")
        scaling = Llama3Rope(**values)
        if scaling.low_freq_factor >= scaling.high_freq_factor:
            raise ValueError(
                f"low_freq_factor {scaling.low_freq_factor} of RoPE is not below "
                f"high_freq_factor {scaling.high_freq_factor}"
            )
        return scaling
