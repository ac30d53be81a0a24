"""Options of a conversion, and their defaults for a task."""

from dataclasses import dataclass, replace
from typing import Literal

from paceline.errors import InvalidRequest
from paceline_coreml.conversion.compress import FORMS
from paceline_coreml.conversion.family import Task
from paceline_coreml.engine.artifact import DECODE_ROWS

BYTES_PER_WEIGHT = {"int8": 1.0, "int8-per-tensor": 1.0, "int4": 0.5, "f16": 2.0}
"""Form of `compress.FORMS` -> size of a weight."""

_FLEXIBLE_ROWS = 4
_CLASSIFIER_ROWS = 128


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
    """Numbers of rows with static functions; empty: the default of the task."""
    flexible: bool = False
    """One function for 1 to `rows` rows instead."""
    stateless: bool = False
    """States are inputs and outputs instead, in one static function."""
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
        if self.functions and self.flexible:
            raise InvalidRequest(
                f"functions are for {', '.join(map(str, self.functions))} rows, and with flexible "
                "there is one for any number; expected one of the two"
            )
        if self.stateless and (self.flexible or len(self.functions) > 1):
            raise InvalidRequest("stateless is set; expected one static number of rows")
        if self.functions and self.rows not in (0, max(self.functions)):
            raise InvalidRequest(
                f"functions are for {', '.join(map(str, self.functions))} rows; expected one for "
                f"{self.rows}, the most of a call, among them"
            )


def with_defaults(options: ConversionOptions, task: Task) -> ConversionOptions:
    """The options with the task's defaults filled in.

    A language model has one static function, of `DECODE_ROWS` rows; with more `rows`, prompts have
    a second one. Of a flexible package only the default shape may run on the Neural Engine
    (coremltools issue 2370), and each shape that runs has a copy of the weights in memory.

    A token classifier's longest text is one call, of one of a few fixed lengths. With flexible
    lengths, two axes of the mask would be flexible. Several texts share a call, so fixed lengths
    waste little. Raises InvalidRequest for a flexible one.
    """
    if task != "causal-lm" and options.flexible:
        raise InvalidRequest("flexible is set; expected fixed rows for a model of this task")
    default = _CLASSIFIER_ROWS if task != "causal-lm" else DECODE_ROWS
    rows = options.rows or max(
        options.functions, default=_FLEXIBLE_ROWS if options.flexible else default
    )
    if options.flexible:
        return replace(options, rows=rows)
    fewer = 1 if task != "causal-lm" else min(DECODE_ROWS, rows)
    functions = tuple(sorted({*(options.functions or (fewer, rows))}))
    if options.stateless and (task != "causal-lm" or len(functions) > 1):
        raise InvalidRequest(
            "stateless is set; expected a language model, and one static number of rows"
        )
    slots = options.slots if task == "causal-lm" else rows
    return replace(options, rows=rows, functions=functions, slots=slots)
