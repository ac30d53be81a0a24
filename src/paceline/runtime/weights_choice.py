"""Which form of a GGUF file's weights the engine openvino runs: `--weights auto`.

The file's own have 4 to 8 bits and a scale per 32, which every call unpacks. In int8 with a scale
per output nothing is unpacked; but there is more to read, and the weights are rounded once more.
Both forms are built and measured once, in turns. int8 is taken where all of this holds:

    it is faster   by `_LEAST_GAIN`, over the texts of `engine_choice.Costs`
    it is close    a mean KL under `_MOST_KL` from the file's weights with inputs that are not
                   rounded, over `_TEXT`
    it fits        both forms at once

The forms are two models: each has its own fingerprint, cost profile and `exact`. Invariant: what
was measured is stored whole or not at all, and without it the file's own weights run.
"""

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

from paceline.decoding.costs import CostTable
from paceline.decoding.logprobs import kl_divergences
from paceline.decoding.types import Block
from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine, KVSequence
from paceline.errors import ModelError
from paceline.models import ModelFiles, Progress, fits, int8_bytes, int8_folders, stat_fingerprint
from paceline.runtime.drafting import warmed_up
from paceline.runtime.engine_choice import OPENVINO, Costs
from paceline.storage.files import digest_of, read_json, write_json
from paceline.storage.system import cpu_cores, processor

FILE, INT8 = "file", "int8"

_LEAST_GAIN = 1.05
"""Less is not worth the disk of a second form, and is within the noise of a busy machine."""
_MOST_KL = 0.01
"""Nats per token."""
_ROWS = (1, 2, 4, 8)
_ROUNDS = (3, 16)
"""At least, and at most."""
_ROUNDS_SECONDS = 20.0
"""After this no round begins beyond the least."""
_TOKENS = 400
"""Most tokens of the text."""
_AT_ONCE = 32
_SLOTS = 512
_LEAST_CONTEXT = 2 * _AT_ONCE
_VERSION = 1
"""Of what is stored."""

_TEXT = """The river had been rising since noon, and by the time the children came home from school
the lower meadow was gone. Their grandmother stood at the gate with a lantern, although it was not
yet dark. She had seen three floods in her life, she said, and each of them had begun like this one:
with rain in the hills, a warm wind, and everybody at the market saying that it would pass. They
carried the chairs upstairs first, then the books, and last of all the clock, which stopped as they
set it down.

def median(values: list[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2

Question: What is the capital of France, and which river runs through it?
Answer: Paris is the capital of France. The Seine runs through it.

1. Preheat the oven to 180 degrees and butter a tin of 20 cm.
2. Beat three eggs with 150 g of sugar until the mixture is pale.
3. Fold in 120 g of flour, and bake for 35 minutes.

{"name": "Ada", "born": 1815, "languages": ["English", "French"], "known_for": "the first program"}

Die Geschwindigkeit eines Programms hängt selten von der Sprache ab, in der es geschrieben ist.
"""


class WeightsChoice(NamedTuple):
    """The form that was taken."""

    form: str
    """`FILE` or `INT8`."""
    reason: str
    """For people: the form, and why."""
    faster: float | None = None
    """Speed of int8 over the file's own weights; None: not measured."""
    kl: float | None = None
    """Nats per token; None: not measured."""


class Comparison(NamedTuple):
    """Both forms, as measured on this machine."""

    file: CostTable
    int8: CostTable
    kl: float

    def choice(self, *, serves: bool) -> WeightsChoice:
        """The better form for a server, or for one answer at a time."""
        seconds = []
        for table in (self.file, self.int8):
            costs = Costs(0.0, table, batches=True)
            seconds.append(costs.served_seconds() if serves else costs.seconds(1))
        faster = seconds[0] / seconds[1]
        figures = f"{faster:.2f} times as fast as the file's own weights, KL {self.kl:.4f}"
        if faster < _LEAST_GAIN:
            reason = f"the file's own; int8 per channel is {figures}"
        elif not self.kl < _MOST_KL:  # not a number, too
            reason = f"the file's own; int8 per channel is {figures}, over {_MOST_KL}"
        else:
            return WeightsChoice(INT8, f"int8 per channel, {figures}", faster, self.kl)
        return WeightsChoice(FILE, reason, faster, self.kl)


def choose_weights(
    files: ModelFiles,
    as_int8: Callable[[], ModelFiles],
    settings: EngineSettings,
    progress: Progress,
) -> tuple[ModelFiles, WeightsChoice]:
    """The form of a model to run, and why; measured at the first call.

    Args:
        files: the model as it is.
        as_int8: converts it, at its first call, and returns the files of that form.
        settings: of the engine; `measurements` is where the comparison is stored.
        progress: shows long work.

    A form that cannot be made or opened is not taken.
    """
    if files.engine != OPENVINO or files.weights is None:
        form = "GGUF file" if files.weights is not None else "model"
        return files, _own(f"the engine {files.engine} runs this {form} as it is")
    comparison = _stored(files.weights, settings)
    if comparison is None:
        try:
            size = int8_bytes(files.weights)
        except ModelError as error:
            return files, _own(str(error))
        if files.context_length < _LEAST_CONTEXT:
            return files, _own(
                f"a context of {files.context_length} tokens is too short to compare"
            )
        if not fits(files.weights.stat().st_size + size):
            return files, _own("comparing it with int8 takes more memory than there is")
        folders = int8_folders()
        try:
            eight = as_int8()
            comparison = _compare(files, eight, settings, progress)
        except ModelError as error:
            return files, _own(str(error))
        _store(comparison, files.weights, settings)
        is_used = any(comparison.choice(serves=use).form == INT8 for use in (False, True))
        if not is_used and eight.folder not in folders:
            shutil.rmtree(eight.folder, ignore_errors=True)
    choice = comparison.choice(serves=settings.contexts > 1)
    return (as_int8() if choice.form == INT8 else files), choice


def _own(why: str) -> WeightsChoice:
    return WeightsChoice(FILE, f"the file's own; {why}")


def _compare(
    files: ModelFiles, eight: ModelFiles, settings: EngineSettings, progress: Progress
) -> Comparison:
    slots = min(_SLOTS, files.context_length)
    settings = replace(settings, taps=(), contexts=1, cache_tokens=slots)
    tokenizer = files.tokenizer()
    tokens = tokenizer.with_bos(tokenizer.encode(_TEXT))[: min(_TOKENS, slots - _AT_ONCE)]

    def opened(form: ModelFiles, *, round_inputs: bool = True) -> Engine:
        of_form = replace(settings, round_inputs=round_inputs)
        engine = open_engine(form.engine, form.path, form.context_length, of_form)
        return warmed_up(engine, progress)

    own, int8 = opened(files), opened(eight)
    with progress.task("timing the file's weights and int8"):
        own_seconds, int8_seconds = measure_seconds([own, int8])
    del own  # its memory: three engines would need more than `fits` was asked for
    exact = opened(files, round_inputs=False)
    with progress.task("comparing what they compute"):
        kl = divergence(exact, int8, tokens)
    return Comparison(CostTable(own_seconds), CostTable(int8_seconds), kl)


def measure_seconds(engines: Sequence[Engine]) -> list[dict[int, float]]:
    """Rows -> least seconds of a call, of each engine; measured in turns."""
    tables = [dict[int, float]() for _ in engines]
    with contextlib.ExitStack() as stack:
        sequences = [stack.enter_context(contextlib.closing(engine.open())) for engine in engines]
        started = perf_counter()
        for count in range(_ROUNDS[1]):
            if count >= _ROUNDS[0] and perf_counter() - started > _ROUNDS_SECONDS:
                break
            for rows in _ROWS:
                for engine, sequence, table in zip(engines, sequences, tables, strict=True):
                    seconds = _seconds(engine, sequence, rows)
                    table[rows] = min(table.get(rows, seconds), seconds)
    return tables


def _seconds(engine: Engine, sequence: KVSequence, rows: int) -> float:
    """Time of the better of two calls.

    After another engine's call the weights are not in the processor's caches, as they are while an
    engine answers.
    """
    times = []
    for _ in range(2):
        began = perf_counter()
        engine.step([(sequence, Block([0] * rows, rows))])
        times.append(perf_counter() - began)
    return min(times)


def divergence(reference: Engine, other: Engine, tokens: Sequence[int]) -> float:
    """Mean KL(reference || other) of the next tokens after each of `tokens`, nats per token."""
    total = 0.0
    with (
        contextlib.closing(reference.open()) as left,
        contextlib.closing(other.open()) as right,
    ):
        for at in range(0, len(tokens), _AT_ONCE):
            part = list(tokens[at : at + _AT_ONCE])
            block = Block(part, len(part))
            # Copies: two sequences of one engine may have the same memory of logits.
            expected, actual = (
                engine.step([(sequence, block)]).logits[0].copy()
                for engine, sequence in ((reference, left), (other, right))
            )
            total += float(kl_divergences(expected, actual).sum())
            left.commit(len(part))
            right.commit(len(part))
    return total / len(tokens)


def _stored(gguf: Path, settings: EngineSettings) -> Comparison | None:
    """What `_store` wrote; None: nothing, or it is damaged."""
    if settings.measurements is None:
        return None
    try:
        value = read_json(_path(gguf, settings.measurements, settings.threads))
        return Comparison(_table(value[FILE]), _table(value[INT8]), float(value["kl"]))
    except (ModelError, AttributeError, KeyError, TypeError, ValueError):
        return None


def _table(seconds: Mapping[str, float]) -> CostTable:
    return CostTable({int(rows): float(cost) for rows, cost in seconds.items()})


def _store(comparison: Comparison, gguf: Path, settings: EngineSettings) -> None:
    if settings.measurements is None:
        return
    path = _path(gguf, settings.measurements, settings.threads)
    value = {FILE: comparison.file.seconds, INT8: comparison.int8.seconds, "kl": comparison.kl}
    with contextlib.suppress(OSError):  # then it is measured another time
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, value)


def _path(gguf: Path, folder: Path, threads: int | None) -> Path:
    import openvino

    model = f"{gguf} {stat_fingerprint([gguf])}"
    depends = [_VERSION, model, openvino.get_version(), processor(), cpu_cores(), threads]
    return folder / f"{digest_of(depends)}.weights"
