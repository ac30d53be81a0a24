"""Which engine runs a GGUF file: `--engine auto`.

Two engines run GGUF files, and each has its use. Libraries of llama.cpp's family map the file, are
ready at once and decode near the limit of memory; further rows cost nearly as much as the first.
OpenVINO takes seconds to start and three times the file in memory; its calls of many rows are
cheap, so it wins with long drafts, and with many sequences.

    both were measured here    the one that takes less time for `_TOKENS` tokens, its start included
    one answer at a time       llamacpp
    a server, many at once     openvino, if the model fits

A file that one engine does not run is the other's. The choice changes tokens, as the engines round
otherwise: a seed's answer is repeated by naming the engine. Invariant: nothing is measured for the
choice; costs are those that `plan` and earlier answers left.
"""

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from paceline.decoding.costs import CostTable, expected_tokens
from paceline.errors import MissingExtra, ModelError
from paceline.models import check_layout, check_supported, fits, stat_fingerprint
from paceline.storage.files import digest_of, read_json, write_json
from paceline.storage.gguf_file import read_gguf
from paceline.storage.system import cpu_cores, processor

if TYPE_CHECKING:
    from paceline.engines.llamacpp.binding import Binding

OPENVINO, LLAMACPP = "openvino", "llamacpp"

_TOKENS = 500
"""Tokens of an answer, and of a short chat."""

_CHANCES = (0.0, 0.3, 0.6, 0.9)
"""Chances that a draft token is accepted: of text that nothing foresees up to text that is copied,
in equal parts."""

_MOST_DRAFT = 15
_AT_ONCE = 8
"""Sequences of a busy server."""

_FORM = 1
"""Version of what is stored."""


class Costs(NamedTuple):
    """What an engine costs with a model on this machine."""

    load_seconds: float
    table: CostTable
    batches: bool
    """Whether a call takes rows of several sequences."""

    def seconds(self, tokens: int) -> float:
        """Time for one answer of so many tokens, with its start."""
        paces = [_seconds_per_token(self.table, chance) for chance in _CHANCES]
        return self.load_seconds + tokens * sum(paces) / len(paces)

    def served_seconds(self) -> float:
        """Time per token of plain decoding for `_AT_ONCE` sequences."""
        return self.table(_AT_ONCE) / _AT_ONCE if self.batches else self.table(1)


class EngineChoice:
    """The choice for one model; `paceline.models.resolve` asks it once the file is known."""

    def __init__(
        self,
        folder: Path,
        *,
        engine: str | None = None,
        contexts: int = 1,
        hidden_states: bool = False,
        best_weights: bool = False,
    ) -> None:
        """Choose nothing yet.

        Args:
            folder: of what was measured.
            engine: the one that the caller wants; None: the better one.
            contexts: more than one: for many sequences at once.
            hidden_states: whether a drafter needs them, which llamacpp does not return.
            best_weights: whether openvino runs the better form of the weights, which has its own
                costs (`weights_choice.py`).
        """
        self._folder, self._engine = folder, engine
        self._contexts, self._hidden_states = contexts, hidden_states
        self._best_weights = best_weights
        self._model, self._bytes = "", 0
        self.engines: tuple[str, ...] = ()
        """Engines that run the file, where one was chosen."""
        self.reason = ""
        """Why this engine, for people; empty where none was chosen."""

    def __call__(self, name: str, gguf: Path | None) -> str:
        """The engine for the GGUF file `gguf`, or for a model of the registry."""
        if gguf is None:
            self._model = name
        else:
            self._model, self._bytes = f"{gguf} {stat_fingerprint([gguf])}", gguf.stat().st_size
        if self._engine is not None:
            return self._engine
        if self._hidden_states:
            self.reason = "a drafter reads hidden states, which llamacpp does not return"
            return OPENVINO
        faults = self._faults(gguf)
        self.engines = tuple(engine for engine, fault in faults.items() if not fault)
        if len(self.engines) == 2:
            return self.better()
        self.reason = "; ".join(filter(None, faults.values()))
        # If neither runs the file, openvino's error is the one that people know.
        return LLAMACPP if self.engines == (LLAMACPP,) else OPENVINO

    def better(self) -> str:
        """The better of two engines, by what is known now."""
        openvino, llamacpp = self.costs(OPENVINO), self.costs(LLAMACPP)
        serves = self._contexts > 1
        if openvino is not None and llamacpp is not None:
            seconds = [
                costs.served_seconds() if serves else costs.seconds(_TOKENS)
                for costs in (openvino, llamacpp)
            ]
            unit = f"s a token of {_AT_ONCE} answers" if serves else f"s for {_TOKENS} tokens"
            self.reason = f"measured: openvino {seconds[0]:.3g}, llamacpp {seconds[1]:.3g} {unit}"
            return OPENVINO if seconds[0] < seconds[1] else LLAMACPP
        if not serves:
            self.reason = "it starts sooner, and needs no more memory than the file"
            return LLAMACPP
        if fits(self._bytes):
            self.reason = "its calls have rows of many answers"
            return OPENVINO
        self.reason = "openvino needs more memory than there is"
        return LLAMACPP

    def costs(self, engine: str) -> Costs | None:
        """What `remember` stored on this machine; None: nothing, or it is damaged."""
        try:
            value = read_json(self._path(engine))
            table = CostTable({int(rows): float(cost) for rows, cost in value["seconds"].items()})
            return Costs(float(value["load_seconds"]), table, bool(value["batches"]))
        except (ModelError, AttributeError, KeyError, TypeError, ValueError):
            return None

    def remember(self, engine: str, costs: Costs) -> None:
        """Store what an engine costs with this model."""
        path = self._path(engine)
        if self._model and engine in (OPENVINO, LLAMACPP):
            with contextlib.suppress(OSError):  # then it is stored another time
                path.parent.mkdir(parents=True, exist_ok=True)
                write_json(path, costs._asdict() | {"table": None, "seconds": costs.table.seconds})

    def _faults(self, gguf: Path | None) -> dict[str, str]:
        """Engine -> why it does not run the file, or nothing."""
        from paceline.engines.llamacpp.libraries import installed

        try:
            libraries = [*installed()]
        except MissingExtra as error:
            return {OPENVINO: "", LLAMACPP: str(error)}
        if gguf is None:
            return {OPENVINO: "", LLAMACPP: ""}
        names = [f"{library.name} {library.version}" for library in libraries]
        path = self._folder / f"{digest_of([_FORM, *names, self._model])}.runs"
        with contextlib.suppress(ModelError):
            stored = read_json(path)
            if isinstance(stored, dict) and stored.keys() == {OPENVINO, LLAMACPP}:
                return {engine: str(fault) for engine, fault in stored.items()}
        faults = _faults_of(gguf, libraries)
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, faults)
        return faults

    def _path(self, engine: str) -> Path:
        depends = [_FORM, engine, self._model, processor(), cpu_cores()]
        if self._best_weights and engine == OPENVINO:
            depends.append("the better weights")
        return self._folder / f"{digest_of(depends)}.costs"


def _faults_of(path: Path, libraries: Sequence["Binding"]) -> dict[str, str]:
    from paceline.engines.llamacpp.libraries import library_for

    try:
        content = read_gguf(path)
    except ModelError as error:
        return {OPENVINO: "", LLAMACPP: str(error)}

    def llamacpp() -> None:
        check_layout(path, content)
        library_for(path, libraries, lambda _library: False)
        family = content.fields.get("general.architecture")
        if content.fields.get(f"{family}.pooling_type"):
            raise ModelError("it makes embeddings, for which llamacpp has no hidden states")

    def openvino() -> None:
        check_supported(path, content)

    faults = {}
    for engine, check in ((OPENVINO, openvino), (LLAMACPP, llamacpp)):
        try:
            check()
            faults[engine] = ""
        except ModelError as error:
            faults[engine] = str(error)
    return faults


def _seconds_per_token(cost: CostTable, chance: float) -> float:
    """Least seconds per token, over drafts of all lengths that were measured."""

    def pace(rows: int) -> float:
        return cost(rows) / expected_tokens([chance] * (rows - 1))

    return min(map(pace, _lengths(cost)))


def _lengths(cost: CostTable) -> Iterable[int]:
    return range(1, min(max(cost.seconds), _MOST_DRAFT + 1) + 1)
