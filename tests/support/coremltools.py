"""Faster coremltools conversion in tests, with the same output."""

from types import SimpleNamespace
from typing import Any
from unittest import mock


def convert_fast() -> None:
    """Halve the time of a small conversion without changing its result.

    A program is validated at the ends of a pipeline, not after each of 100 passes, and then
    not written out for a log of debug messages; what no weight is compressed in need not be
    searched for compressed weights after each pass; and the full garbage collection at the end,
    half a second with all that tests import, is skipped.
    """
    from coremltools.converters import _converters_entry
    from coremltools.converters.mil.mil import Block, Program
    from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager

    apply_pipeline, validate = PassPipelineManager.apply_pipeline, Program.validate
    propagate = Block._propagate_nonreplaceable_vars

    def validated(program: Any, *, check_essential_scope: bool = False) -> None:
        # After passes that take the scope of operations into account.
        if check_essential_scope:
            validate(program, check_essential_scope=True)

    def validated_once(program: Any, pipeline: Any) -> None:
        validate(program)
        with (
            mock.patch.object(Program, "validate", validated),
            mock.patch.object(Program, "__str__", lambda _: ""),
        ):
            apply_pipeline(program, pipeline)
        validate(program)

    def propagated(block: Any) -> None:
        if any(
            op.blocks or op.op_type.startswith("constexpr_") or _is_compressed(op)
            for op in block.operations
        ):
            propagate(block)

    PassPipelineManager.apply_pipeline = staticmethod(validated_once)
    Block._propagate_nonreplaceable_vars = propagated
    _converters_entry.gc = SimpleNamespace(collect=lambda: 0)


def _is_compressed(op: Any) -> bool:
    """Return True if an output depends on a compressed weight."""
    return any(out.nonreplaceable_vars_upstream for out in op.outputs or ())
