"""What is to be made of a model: a recipe, and what of it depends on what the model is for."""

from dataclasses import dataclass, replace
from typing import Literal

from paceline.errors import InvalidRequest
from paceline.tools.coreml.compress import FORMS
from paceline.tools.coreml.family import Kind

BYTES = {"int8": 1.0, "int8-per-tensor": 1.0, "int4": 0.5, "f16": 2.0}
"""What a weight takes in each form."""

_ROWS: dict[Kind, int] = {"causal-lm": 4, "token-classification": 128}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What is to be made of a model.

    Raises:
        InvalidRequest: a value is out of range.

    """

    weights: str = "int8"
    """One of `compress.FORMS`."""
    keep: tuple[str, ...] = ()
    """Patterns of weights that stay float16; see `compress`."""
    rows: int = 0
    """The most rows of a call; 0: as many as suit the task."""
    functions: tuple[int, ...] = ()
    """Numbers of rows to make static functions for; empty: one for any number."""
    slots: int = 2048
    """The longest text, in tokens."""
    topology: str | None = None
    """As `20+4+6+2`; None: as few packages of layers as `megabytes` allows."""
    megabytes: int = 1500
    """The largest package."""
    head_rows: int = 16384
    """The most tokens in a package of the head."""
    taps: tuple[int, ...] | Literal["all"] = ()
    """Layers whose hidden states come out, for a drafter or for `golden`."""
    routing: str | None = None
    """Which experts a row has, one of `families.ROUTINGS`; None: those it was trained with."""

    def __post_init__(self) -> None:
        if self.weights not in FORMS:
            raise InvalidRequest(f"weights is {self.weights!r}; expected one of {', '.join(FORMS)}")
        for name in ("slots", "megabytes", "head_rows"):
            if getattr(self, name) < 1:
                raise InvalidRequest(f"{name} is {getattr(self, name)}; expected 1 or more")
        if self.rows < 0:
            raise InvalidRequest(f"rows is {self.rows}; expected 1 or more")
        if self.functions and min(self.functions) < 1:
            raise InvalidRequest(f"functions is {self.functions}; expected numbers of rows")
        if self.functions and self.rows not in (0, max(self.functions)):
            raise InvalidRequest(
                f"functions are for {', '.join(map(str, self.functions))} rows; expected one for "
                f"{self.rows}, the most of a call, among them"
            )


def suited(recipe: Recipe, kind: Kind) -> Recipe:
    """The recipe with what it leaves to the model.

    A token classifier's longest text is a call, of one of a few lengths. Not of any length, as
    others: rows see each other, so that two axes of a mask would be flexible, and where only the
    default shape of a flexible package runs on the Neural Engine (coremltools issue 2370) that
    would be T = 1. Nothing is lost: texts share a call, and fill one up.
    """
    rows = recipe.rows or max(recipe.functions, default=_ROWS[kind])
    recipe = replace(recipe, rows=rows)
    if kind == "causal-lm":
        return recipe
    return replace(recipe, slots=rows, functions=recipe.functions or tuple(sorted({1, rows})))
