"""A worker process of `bench peers --calls`: opens a runtime, then answers tasks on standard input.

A line of JSON per task: `{"rows": n}` or `{"prompt": n}`, with `calls`, the number of timed calls;
their median is the answer, after a call that is not timed. Whatever a runtime prints goes to
standard error.
"""

import json
import os
import sys
from pathlib import Path
from statistics import median
from typing import Any, TextIO

_FIRST_PROMPT = 16
"""Tokens of a prompt. A runtime is ready when it has computed the first token after it."""


def main() -> None:
    """Serve; the argument is JSON with `runtime`, `gguf`, `threads` and `context`."""
    setup = json.loads(sys.argv[1])
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as answers:
        os.dup2(2, 1)
        _serve(setup, answers)


def _serve(setup: dict[str, Any], answers: TextIO) -> None:
    from paceline_lab.peers.calls.runtimes import RUNTIMES, CallRuntime, prompt_of

    runtime: CallRuntime = RUNTIMES[setup["runtime"]](
        Path(setup["gguf"]), threads=setup["threads"], context=setup["context"]
    )

    def seconds(task: dict[str, int]) -> float | None:
        if "prompt" in task:
            return runtime.prompt(prompt_of(task["prompt"]))
        return runtime.rows(task["rows"])

    def answer(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    seconds({"prompt": _FIRST_PROMPT})
    answer({"packages": [*runtime.packages], "facts": dict(runtime.facts)})
    for line in sys.stdin:
        task = json.loads(line)
        times: list[float] = []
        if seconds(task) is not None:  # not timed
            times = [
                duration for _ in range(task["calls"]) if (duration := seconds(task)) is not None
            ]
        answer({"seconds": median(times) if times else None})


if __name__ == "__main__":
    main()
