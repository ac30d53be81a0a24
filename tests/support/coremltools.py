"""Lets coremltools convert faster in tests. What it makes is the same."""

from typing import Any
from unittest import mock


def validate_once_a_pipeline() -> None:
    """Let coremltools validate a program at the ends of a pipeline, not after each of 100 passes.

    That is nearly half of the time of a small conversion. It still does after those passes that
    take the scope of operations into account.
    """
    from coremltools.converters.mil.mil import Program
    from coremltools.converters.mil.mil.passes.pass_pipeline import PassPipelineManager

    apply_pipeline, validate = PassPipelineManager.apply_pipeline, Program.validate

    def validated(program: Any, *, check_essential_scope: bool = False) -> None:
        if check_essential_scope:
            validate(program, check_essential_scope=True)

    def validated_once(program: Any, pipeline: Any) -> None:
        validate(program)
        with mock.patch.object(Program, "validate", validated):
            apply_pipeline(program, pipeline)
        validate(program)

    PassPipelineManager.apply_pipeline = staticmethod(validated_once)
