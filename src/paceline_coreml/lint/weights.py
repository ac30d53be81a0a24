"""Rules about weights: their compression, and the sizes of packages."""

from collections.abc import Iterator, Sequence
from typing import Final

from paceline.storage.files import size_of
from paceline_coreml.lint.program import Program, first
from paceline_coreml.lint.rules import ARTIFACT_RULES, Fault, program_rule
from paceline_coreml.rehearsal.program import MilPackage

_MEGABYTE: Final = 1 << 20
_SMALL: Final = 14 * _MEGABYTE
_LARGE: Final = 2048 * _MEGABYTE
_PROCESS: Final = 3 * 1024 * _MEGABYTE
_SCALED: Final = "constexpr_blockwise_shift_scale"
_TABLE: Final = "constexpr_lut_to_dense"


@program_rule("high", "ane-book, research and experiment 35: such shards ran on the CPU")
def int4_blocks(program: Program) -> Iterator[Fault]:
    """Use 8 bits or 4-bit lookup tables, instead of 4-bit weights with a scale per block.

    Checks bits and blocks, because the same operation stores 8 bits per channel.
    """
    for op in program.storage_ops(_SCALED):
        data = program.stored_constant(first(op, "data"))
        scale = program.shape_of(first(op, "scale"))
        if data is None or scale is None or data.dtype not in ("int4", "uint4"):
            continue
        if any(1 < (blocks or 0) < size for blocks, size in zip(scale, data.shape, strict=True)):
            yield Fault(op.name, f"4 bits with scales {list(scale)} for {list(data.shape)}")


@program_rule("medium", "apple/coremltools#2688: fails to load on macOS 26")
def table_scale(program: Program) -> Iterator[Fault]:
    """Palettize weights without a scale per channel."""
    for op in program.storage_ops(_SCALED):
        maker = program.maker(first(op, "data"))
        if maker is not None and maker.type == _TABLE:
            yield Fault(op.name, f"scales the lookup table {maker.name}")


@program_rule(
    "medium",
    "apple/coremltools#2716: some from coremltools 9 crash after 100 runs, from 8.3 they do not",
)
def table_state(program: Program) -> Iterator[Fault]:
    """Test a model with states and lookup tables of weights in long runs."""
    count = len(list(program.storage_ops(_TABLE)))
    if count and program.stateful:
        yield Fault("", f"{count} lookup tables, and {len(program.function.states)} states")


@program_rule("high", "ane-book, experiment 36: a cosine of 0.9555")
def expert_scale(program: Program) -> Iterator[Fault]:
    """Quantize experts per channel, instead of with one scale for several.

    Recognizes experts by the names of their weights.
    """
    for op in program.storage_ops(_SCALED):
        scale = program.stored_constant(first(op, "scale"))
        data = program.stored_constant(first(op, "data"))
        if scale is None or data is None or "expert" not in op.name.lower():
            continue
        if all(size == 1 for size in scale.shape) and data.shape[0] > 1:
            yield Fault(op.name, f"one scale for {list(data.shape)}")


@program_rule(
    "medium",
    "ane-book, experiments 27, 30, 31: under 14 MB to the CPU; contested: 5.3 to 8.1 MB passed",
)
def small(program: Program) -> Iterator[Fault]:
    """Put more layers, or head rows, into a package this small: it may run on the CPU."""
    size = size_of(program.package.path)
    if size < _SMALL:
        yield Fault("", f"{size / _MEGABYTE:.1f} MB; expected {_SMALL // _MEGABYTE} or more")


@program_rule("medium", "the seed experiments: 2,016 MB passed; ane-book: 2.3 GB went to the CPU")
def large(program: Program) -> Iterator[Fault]:
    """Split a package this large: it may run on the CPU."""
    size = size_of(program.package.path)
    if size > _LARGE:
        yield Fault("", f"{size / _MEGABYTE:.0f} MB; expected at most {_LARGE // _MEGABYTE}")


@program_rule(
    "low",
    "the seed experiments: error -14 over about 3 GB; contested: their Phi has 3.2 GB",
    rules=ARTIFACT_RULES,
)
def process(packages: Sequence[MilPackage]) -> Iterator[Fault]:
    """Use fewer bits per weight: no process is known to load packages this large together."""
    size = sum(size_of(package.path) for package in packages)
    if size > _PROCESS:
        yield Fault("", f"{size / _MEGABYTE:.0f} MB; expected at most {_PROCESS // _MEGABYTE}")
