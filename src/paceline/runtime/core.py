"""The core of a loaded model: files, engine and drafters, joined for each request in a `Stream`.

For callers that manage KV themselves: conversations, the scheduler, measurements. `Model`
(`model.py`) is the door for all others.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, NoReturn, cast
from weakref import WeakSet

from paceline import drafters as drafting
from paceline.decoding.auto import Acceptance
from paceline.decoding.costs import CostTable
from paceline.decoding.generation import Generation
from paceline.decoding.reasoning import answer_text
from paceline.decoding.text import showing
from paceline.drafters import (
    DrafterResources,
    DrafterSpec,
    DraftKV,
    DraftModel,
    Fault,
    GuardedDrafter,
    Probe,
    RequestContext,
)
from paceline.engines.base import Closes, Engine, KVSequence
from paceline.engines.costs import StoredCosts, measure
from paceline.engines.invariance import Compared
from paceline.errors import InvalidRequest
from paceline.models import QUIET, TOKENIZER, ModelFiles, Progress, TokenBytes, cache_dir
from paceline.options import Options
from paceline.runtime.closed import Closed
from paceline.runtime.drafting import drafter_resources, open_draft_model
from paceline.runtime.exactness import MEASUREMENTS, Exactness
from paceline.runtime.kept import kept_answers
from paceline.runtime.prompt import Prompt, encode_prompt
from paceline.runtime.request import Defaults, Request, check, defaults_of, structure
from paceline.runtime.result import Stats
from paceline.runtime.stream import Stream
from paceline.runtime.turns import Turns
from paceline.storage.processes import use_native_threads

if TYPE_CHECKING:
    from paceline.constraints.grammar import Grammars

_SMALL_BYTES = 200_000_000
"""Most bytes of the weights of a small model."""


class ModelCore:
    """A model in memory. Whoever has its `lock` may use its engine and its drafters."""

    def __init__(
        self,
        files: ModelFiles,
        engine: Engine,
        *,
        defaults: Defaults | None = None,
        progress: Progress = QUIET,
        open_with: Callable[[tuple[int, ...]], Engine] | None = None,
        keep: bool = False,
    ) -> None:
        """Join an engine and the files it was opened from; `load` is the usual way.

        Args:
            files: the model's files.
            engine: opened from `files`.
            defaults: for options that requests leave out; None: the registry's, else the model's.
            progress: gets the progress of long work.
            open_with: opens the engine again with other taps, for a drafter that needs them.
            keep: keep answers in the cache folder, and draft from those kept: see `KeptAnswers`.
        """
        self.files = files
        self.engine = engine
        self.defaults = defaults_of(files) if defaults is None else defaults
        self.load_seconds = 0.0
        self.lock = Turns()
        """Whoever has it may use the engine and the drafters."""
        self._open_with = open_with
        self._opened = 0  # sequences of requests and conversations
        self._streams = WeakSet[Stream]()
        self._closed = False
        self._slots = engine.free_slots
        self._progress = progress
        self._begin_measurements()
        self._acceptance = Acceptance()
        self._kept = kept_answers(files, engine.vocab_size, progress) if keep else None
        self._shared = drafter_resources(files, progress)
        self._shared.vocab_size = engine.vocab_size
        self._shared.open_model = self._open_draft_model
        self._share_engine()

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest(
            f"{self.files.name} cannot be pickled or copied: its weights are in this process; send "
            "its name or path, and load it there"
        )

    def measured_costs(self) -> CostTable:
        """Return what calls cost, after calls that are made to learn it if none were seen."""
        if not self.costs.known:
            self.measure_costs()
        return self.costs.table()

    def measure_costs(self) -> None:
        """Make calls to learn what they cost. Raises CacheFull if there are no slots for them."""
        with self._progress.task("measuring this machine"):
            measure(self.engine, self.costs)
        self.costs.store()

    def compared(self) -> Mapping[str, Compared]:
        """Return all conditions of exactness, measured now where one is missing."""
        return self._exactness.compared() or {}

    def _begin_measurements(self) -> None:
        folder, fingerprint = cache_dir() / MEASUREMENTS, self.files.fingerprint
        self.costs = StoredCosts(self.engine, fingerprint, self.files.weights_bytes, folder)
        """What calls cost on this machine, as far as answers have shown it."""
        self._exactness = Exactness(self.engine, fingerprint, folder)

    @property
    def _is_small(self) -> bool:
        """Whether rows are compared before the first answer, in tenths of a second, not after."""
        return self.files.weights_bytes <= _SMALL_BYTES

    @cached_property
    def grammars(self) -> "Grammars":
        """Compiles what answers are constrained to."""
        from paceline.constraints.grammar import Grammars

        return Grammars(
            self.files.folder / TOKENIZER,
            vocab_size=self.engine.vocab_size,
            stop_token_ids=self.files.stop_token_ids,
        )

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self.files.tokenizer())

    def encode_prompt(self, prompt: Prompt, request: Request) -> tuple[list[int], Request]:
        """See `prompt.encode_prompt`."""
        return encode_prompt(self.files, prompt, request, self.engine.vocab_size)

    def request(
        self, options: Options, defaults: Defaults | None = None, *, private: bool = False
    ) -> Request:
        """Check options; the drafter `auto` becomes the drafters that this model has.

        Args:
            options: what the caller gives.
            defaults: for the options left out; None: the model's own.
            private: the answer is neither kept nor drafted from kept ones.

        Raises InvalidRequest if an option cannot be served, or the grammar of the answer is wrong,
        and PacelineError in a forked child.
        """
        use_native_threads()
        request = check(options, self.defaults if defaults is None else defaults)
        kinds = {*self._shared.shipped}
        if self._kept is not None and self._kept.text is not None and not private:
            kinds.add("kept")
        drafter = request.drafter.resolve(kinds, prediction=bool(request.prediction))
        probe = request.probe and request.probe.resolve(kinds)
        constraint = structure(options, lambda: self.grammars) or request.constraint
        return replace(
            request, drafter=drafter, probe=probe, private=private, constraint=constraint
        )

    def exactness(
        self, drafter: DrafterSpec, *, cached: bool = False, shared: bool = False
    ) -> Mapping[str, Compared] | None:
        """Return what was measured of the conditions under which an answer is computed.

        Args:
            drafter: without one, no block has several rows.
            cached: whether KV of an earlier prompt is used.
            shared: whether calls may have other sequences too, which also divides prompts.

        Returns:
            Condition (see `engines/invariance.py`) -> what was compared. None: the KV cache had too
            few free slots to measure.
        """
        blocks = not drafter.none or self.engine.min_rows < 2
        return self._exactness.of_answer(blocks=blocks, cached=cached, shared=shared)

    def taps_for(self, request: Request) -> set[int]:
        """Return the layers whose hidden states the request's drafters read.

        Raises ModelError if a drafter cannot be read.
        """
        specs = filter(None, (request.drafter, request.probe))
        return {tap for spec in specs for tap in drafting.taps(spec, self._shared)}

    def draft_slots(self, drafter: DrafterSpec) -> int | None:
        """Return the KV slots of the drafter's own model, for all requests together.

        None if it has no model of its own, or that is not open.
        """
        return drafting.slots(drafter, self._shared)

    def ensure_taps(self, request: Request) -> None:
        """Open the engine again if the request's drafters need hidden states it does not return."""
        self._ensure_taps(self.taps_for(request), f"drafter {request.drafter}")

    def _ensure_taps(self, taps: set[int], user: str) -> None:
        """Open the engine again if it does not return the hidden states of `taps`.

        Raises InvalidRequest, which names their `user`, while others use the engine.
        """
        if taps <= {*self.engine.taps}:
            return
        if self._in_use or self._open_with is None:
            raise InvalidRequest(
                f"{user} needs hidden states that this model was loaded "
                "without; name it when loading, or end other answers and conversations first"
            )
        self.engine = self._open_with(tuple(sorted({*self.engine.taps, *taps})))
        self._share_engine()
        self._begin_measurements()

    @property
    def _in_use(self) -> bool:
        """Whether answers or conversations have KV in the engine."""
        return self._opened > 0

    def _share_engine(self) -> None:
        """Give heads the engine, whose weights they share."""
        self._shared.opened, self._shared.heads = self.engine, {}

    def _open_draft_model(self, name: str) -> DraftModel:
        """See `open_draft_model`. Raises ModelError if its vocabulary differs."""
        return open_draft_model(name, self.files, self._slots, self.costs.table, self._progress)

    def open_sequence(self) -> KVSequence:
        """Open a KV sequence of the engine; `close_sequence` closes it."""
        self._opened += 1
        return self.engine.open()

    def close_sequence(self, sequence: KVSequence) -> None:
        """Free the KV blocks of a sequence."""
        self._opened -= 1
        sequence.close()

    def open_stream(
        self,
        tokens: Sequence[int],
        request: Request,
        sequence: KVSequence,
        started: float,
        *,
        end: Callable[[Stream], None],
        memory: DraftKV | None = None,
        fault: Fault | None = None,
        shared: bool = False,
    ) -> Stream:
        """Return a stream on `sequence`, which already holds the KV of a prefix of `tokens`.

        For callers that manage KV themselves; others call `stream`.

        Args:
            tokens: the prompt.
            request: of `request`.
            sequence: a sequence of this model's engine; the caller closes it.
            started: when the request came (`perf_counter`).
            end: called once, when the stream has ended in any way.
            memory: the drafters' own state of the sequence, kept from one stream to the next.
            fault: called with a drafter's name and error when one fails and is silenced; None: the
                error of a drafter ends the answer.
            shared: whether calls may have other sequences too.

        Raises:
            InvalidRequest: the prompt or an option cannot be served.
            ModelError: a drafter cannot be read or does not fit the model.
        """
        acceptance = self._acceptance.discounted()
        keeper = None if request.private else self._kept
        kept = None if keeper is None else keeper.text
        context = RequestContext(
            DraftKV() if memory is None else memory,
            request.prediction[: self.engine.context_length],
            len(tokens),
            request.sampling,
            kept,
        )
        drafters = drafting.create(request.drafter, self._shared, context)
        if fault is not None:
            drafters = [GuardedDrafter(drafter, fault) for drafter in drafters]
        alone = RequestContext(prompt_length=len(tokens), sampling=request.sampling, kept=kept)
        watched = drafting.create(request.probe or DrafterSpec(), self._shared, alone)
        probes = [Probe(drafter, request.max_block - 1) for drafter in watched]
        stopping = request.stopping(self.files.stop_token_ids)
        decode = self.files.tokenizer().continuation
        stats = Stats(load_seconds=self.load_seconds, cached_tokens=sequence.length)
        try:
            generation = Generation(
                tokens,
                vocab_size=self.engine.vocab_size,
                context_length=self.engine.context_length,
                sampling=request.sampling,
                stopping=stopping,
                drafters=[*probes, *drafters],
                policy=request.policy_for(self.costs.table, acceptance, len(tokens)),
                decode=decode,
                cached=sequence.length,
                constraint=request.constraint,
                logprobs=request.logprobs,
                prompt_logprobs=request.prompt_logprobs,
                name=self._token_bytes.name,
                text=answer_text(showing(decode, request.shown), stopping.stop, request.thoughts),
                counters=stats,
            )
        except ValueError as error:
            raise InvalidRequest(str(error)) from error

        compare = partial(
            self.exactness, request.drafter, cached=sequence.length > 0, shared=shared
        )
        # Of a small model, before the prompt takes slots.
        compared = compare() if self._is_small else None

        def learn(stream: Stream) -> None:
            self._acceptance = acceptance
            self.costs.store()
            if request.drafter.uses_earlier_answers:
                self._shared.history.add(stream.answer)

        stream = Stream(
            self.engine,
            sequence,
            generation,
            request,
            stats,
            model=self.files.name,
            drafter=str(request.drafter),
            exactness=(lambda: compared) if self._is_small else compare,
            costs=self.costs,
            started=started,
            lock=self.lock,
            probes=probes,
            on_end=(
                *(learn, end),
                *(() if keeper is None else (keeper.add,)),
            ),
        )
        self._streams.add(stream)
        return stream

    def _free(self) -> None:
        """End all streams and free the engine."""
        for stream in [*self._streams]:
            stream.close()
        engine, closed = self.engine, Closed(self.files.name)
        self._closed = True
        self.engine = cast("Engine", closed)
        self.costs = cast("StoredCosts", closed)
        self._exactness = cast("Exactness", closed)
        self._shared = cast("DrafterResources", closed)
        if isinstance(engine, Closes):
            engine.close()
