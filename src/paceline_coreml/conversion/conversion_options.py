"""Options of a conversion, and their defaults for a task."""

from dataclasses import dataclass, replace
from typing import Literal

from paceline.errors import InvalidRequest
from paceline_coreml.conversion.compress import FORMS
from paceline_coreml.conversion.family import Task

BYTES_PER_WEIGHT = {"int8": 1.0, "int8-per-tensor": 1.0, "int4": 0.5, "f16": 2.0}
"""Form of `compress.FORMS` -> size of a weight."""

_ROWS: dict[Task, int] = {"causal-lm": 4, "token-classification": 128}


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """Options of a conversion. Raises InvalidRequest if a value is out of range."""

    weights: str = "int8"
    """One of `compress.FORMS`."""
    keep: tuple[str, ...] = ()
    """Patterns of weights that stay float16; see `compress`."""
    rows: int = 0
    """Maximum rows per call; 0: the default of the task."""
    functions: tuple[int, ...] = ()
    """Numbers of rows with static functions; empty: one function with flexible rows."""
    slots: int = 2048
    """KV cache positions: the longest text, in tokens."""
    topology: str | None = None
    """Layers per package, as `20+4+6+2`; None: as few packages as `megabytes` allows."""
    megabytes: int = 1500
    """Maximum size of a package of layers, MiB."""
    head_rows: int = 16384
    """Maximum tokens per package of the head."""
    taps: tuple[int, ...] | Literal["all"] = ()
    """Layers whose hidden states are outputs, for a drafter or for `golden`."""
    routing: str | None = None
    """One of `families.ROUTINGS`; None: as trained."""

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


def with_defaults(options: ConversionOptions, task: Task) -> ConversionOptions:
    """The options with the task's defaults filled in.

    A token classifier's longest text is one call, of one of a few fixed lengths. With flexible
    lengths, two axes of the mask would be flexible; where only the default shape of a flexible
    package runs on the Neural Engine (coremltools issue 2370), that would be T = 1. Several texts
    share a call, so fixed lengths waste little.
    """
    rows = options.rows or max(options.functions, default=_ROWS[task])
    options = replace(options, rows=rows)
    if task == "causal-lm":
        return options
    return replace(options, slots=rows, functions=options.functions or tuple(sorted({1, rows})))
