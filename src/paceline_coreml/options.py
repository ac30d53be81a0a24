"""Conversion options, as the command line has them, and their defaults for a task."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

from typer import Option

from paceline.cli import declare
from paceline.errors import InvalidRequest
from paceline.options import COUNT, IntRange

if TYPE_CHECKING:
    from paceline_coreml.engine.artifact import Task

Weights = Literal["int8", "int4", "f16", "int8-per-tensor"]
"""Formats of weights; see `compress`."""

BYTES_PER_WEIGHT = {"int8": 1.0, "int8-per-tensor": 1.0, "int4": 0.5, "f16": 2.0}

_FLEXIBLE_ROWS = 4
_CLASSIFIER_ROWS = 128

Stateless = Annotated[
    bool, Option("--stateless", help="pass keys and values as inputs and outputs")
]


@dataclass(frozen=True, slots=True)
class ConversionOptions:
    """The options of a conversion. Raises InvalidRequest if they contradict each other."""

    weights: Annotated[Weights, Option()] = "int8"
    rows: Annotated[
        Any, declare.count(help="maximum rows per pass; default: 8", metavar="<int>")
    ] = None
    functions: Annotated[
        Any,
        Option(
            parser=declare.IntList(COUNT),
            metavar="T,T",
            help="create static functions for these numbers of rows; the largest is for prompts",
        ),
    ] = None
    flexible: Annotated[
        bool,
        Option("--flexible", help="create one function for up to --rows rows; default: 4"),
    ] = False
    stateless: Stateless = False
    slots: Annotated[
        Any,
        declare.count(help="context length; default: 2048, or the model's own", metavar="<int>"),
    ] = None
    topology: Annotated[str | None, Option(help="layers per package, such as 20+4+6+2")] = None
    megabytes: Annotated[int, declare.count(help="maximum MiB per package of layers")] = 1500
    head_rows: Annotated[int, declare.count(help="maximum tokens per package of the head")] = 16384
    taps: Annotated[
        Any,
        Option(
            parser=declare.IntList(IntRange(0), "all"),
            metavar="N,N",
            help="layers to tap, or all",
        ),
    ] = None
    routing: Annotated[
        str | None, Option(help="expert routing, if the family supports several: top-1 or soft")
    ] = None
    keep: Annotated[
        list[str], declare.several(metavar="PATTERN", help="weights to keep in f16; repeatable")
    ] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, default in {"rows": 0, "functions": (), "slots": 0, "taps": ()}.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)
        if self.weights not in BYTES_PER_WEIGHT:
            expected = ", ".join(BYTES_PER_WEIGHT)
            raise InvalidRequest(f"weights is {self.weights!r}; expected one of {expected}")
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
    options: ConversionOptions, task: "Task", *, single: bool = True
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
    from paceline_coreml.engine.artifact import DECODE_ROWS

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
