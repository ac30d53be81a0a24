"""What is wrong with a converted program, as far as can be seen without a Neural Engine."""

from typing import Any

# What the Neural Engine leaves to the CPU, and what depends on the data.
ELSEWHERE = {
    "cast",
    "cond",
    "gather",
    "gather_along_axis",
    "gather_nd",
    "linear",
    "non_zero",
    "reduce_argmax",
    "scatter_nd",
    "topk",
    "while_loop",
}


def faults(program: Any) -> list[str]:
    """One line for each fault of a MIL program."""
    results = []
    for operation in program.functions["main"].operations:
        kind, name = operation.op_type, operation.name
        if kind in ELSEWHERE:
            results.append(f"{name} is a {kind}")
        for out in operation.outputs:
            if len(out.shape or ()) > 4:
                results.append(f"{name} ({kind}) has the shape {out.shape}")
        # The converter takes a choice's shape from what is chosen between, though Core ML spreads
        # the condition, too: a program that says the wrong shape, and hands it on.
        if kind == "select" and _flexible(operation.cond) != _flexible(operation.outputs[0]):
            results.append(f"{name} chooses {operation.outputs[0].shape} by {operation.cond.shape}")
    return results


def kinds(program: Any) -> set[str]:
    """The types of a program's operations."""
    return {operation.op_type for operation in program.functions["main"].operations}


def _flexible(variable: Any) -> list[int | None]:
    """A shape with None for every axis that is not of one length."""
    return [int(size) if str(size).isdigit() else None for size in variable.shape]
