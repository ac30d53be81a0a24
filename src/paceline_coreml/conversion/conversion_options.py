"""Conversion options, and their defaults for a task."""

from dataclasses import dataclass, replace
from typing import Literal

from paceline.errors import InvalidRequest
from paceline_coreml.conversion.compress import FORMS
from paceline_coreml.conversion.family import Task
from paceline_coreml.engine.artifact import DECODE_ROWS

BYTES_PER_WEIGHT = {"int8": 1.0, "int8-per-tensor": 1.0, "int4": 0.5, "f16": 2.0}
"""Format in `compress.FORMS` -> bytes per weight."""

_FLEXIBLE_ROWS = 4
_CLASSIFIER_ROWS = 128


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """The options of a conversion. Raises InvalidRequest if a value is out of range."""

    weights: str = "int8"
    """One of `compress.FORMS`."""
    keep: tuple[str, ...] = ()
    """Patterns of weights that stay float16; see `compress`."""
    rows: int = 0
    """Maximum rows per forward pass; 0: the task's default."""
    functions: tuple[int, ...] = ()
    """Numbers of rows with static functions; empty: the task's default."""
    flexible: bool = False
    """True to create one function for 1 to `rows` rows instead."""
    stateless: bool = False
    """True to make states inputs and outputs, in one static function."""
    slots: int = 2048
    """KV cache slots: the context length, in tokens."""
    topology: str | None = None
    """Layers per package, such as `20+4+6+2`; None: as few packages as `megabytes` allows."""
    megabytes: int = 1500
    """Maximum size of a package of layers, in MiB."""
    head_rows: int = 16384
    """Maximum tokens per package of the head."""
    taps: tuple[int, ...] | Literal["all"] = ()
    """Layers whose hidden states are outputs, for a drafter or for `golden`."""
    routing: str | None = None
    """One of `families.ROUTINGS`; None: the trained routing."""

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
                f"functions {', '.join(map(str, self.functions))} cannot be used with flexible, "
                "which creates one function for any number of rows; remove one of the two"
            )
        if self.stateless and (self.flexible or len(self.functions) > 1):
            raise InvalidRequest("stateless needs exactly one static number of rows")
        if self.functions and self.rows not in (0, max(self.functions)):
            raise InvalidRequest(
                f"functions {', '.join(map(str, self.functions))} do not match rows {self.rows}; "
                f"make {self.rows} the largest of them"
            )


def with_defaults(
    options: ConversionOptions, task: Task, *, single: bool = True
) -> ConversionOptions:
    """Fill in the task's defaults.

    A language model has two static functions: one row, whose bits may differ, and `DECODE_ROWS`;
    with more `rows`, prompts get a third one. Without `single`, there is none for one row. In a
    flexible package, only the default shape may run on the Neural Engine (coremltools issue 2370),
    and each shape that runs has its own copy of the weights in memory.

    A token classifier runs a text in one forward pass with one of a few fixed lengths. Flexible
    lengths would make two axes of the mask flexible. Several texts share a pass, so fixed lengths
    waste little. Raises InvalidRequest if such a model is flexible.
    """
    if task != "causal-lm" and options.flexible:
        raise InvalidRequest("flexible is only for language models; remove it, or set functions")
    default = _CLASSIFIER_ROWS if task != "causal-lm" else DECODE_ROWS
    rows = options.rows or max(
        options.functions, default=_FLEXIBLE_ROWS if options.flexible else default
    )
    if options.flexible:
        return replace(options, rows=rows)
    fewer = [1] if task != "causal-lm" else [min(DECODE_ROWS, rows)]
    if single and not options.stateless:
        fewer.append(1)
    functions = tuple(sorted({*(options.functions or (*fewer, rows))}))
    if options.stateless and (task != "causal-lm" or len(functions) > 1):
        raise InvalidRequest(
            "stateless needs a language model, and exactly one static number of rows"
        )
    slots = options.slots if task == "causal-lm" else rows
    return replace(options, rows=rows, functions=functions, slots=slots)
