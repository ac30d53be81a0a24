"""A loaded model: its files, its engine and its drafters, joined for each request in a `Stream`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING, Any, Unpack

from paceline import drafters as drafting
from paceline.decoding.auto import Acceptance
from paceline.decoding.costs import CostTable
from paceline.decoding.generation import Generation
from paceline.decoding.reasoning import answer_text
from paceline.decoding.text import showing
from paceline.drafters import (
    AnswerHistory,
    DrafterResources,
    DrafterSpec,
    DraftKV,
    DraftModel,
    Fault,
    GuardedDrafter,
    Probe,
    RequestContext,
)
from paceline.engines import EngineSettings, open_engine
from paceline.engines.base import Engine, KVSequence
from paceline.engines.invariance import Compared
from paceline.engines.profile import CostProfile, load_profile, warm_up
from paceline.errors import InvalidRequest, ModelError
from paceline.models import QUIET, ModelFiles, Progress, cache_dir, resolve, resolve_drafter
from paceline.options import Options
from paceline.runtime.conversation import Conversation
from paceline.runtime.kept import kept_answers
from paceline.runtime.profile import MEASUREMENTS, ModelProfile
from paceline.runtime.prompt import Message, Prompt, encode_prompt
from paceline.runtime.request import Defaults, Request, check, defaults_of
from paceline.runtime.result import Result, Stats
from paceline.runtime.stream import Stream

if TYPE_CHECKING:
    from paceline.runtime.engine_choice import EngineChoice


def drafter_resources(files: ModelFiles, progress: Progress) -> DrafterResources:
    """Return what the drafters of all requests to a model share."""
    shipped = drafting.shipped(files.name, files.path)
    if files.engine == "coreml":  # has hidden states only if it was converted for them
        shipped.pop("mtp", None)
    return DrafterResources(
        target=files.name,
        shipped=shipped,
        find=lambda name: resolve_drafter(name, progress),
        graph=files.path,
    )


def warmed_up(engine: Engine, progress: Progress) -> Engine:
    """Return the engine, after the calls that pack its weights; otherwise the first token waits."""
    if engine.warm_rows:
        with progress.task("packing weights", len(engine.warm_rows), unit="calls") as update:
            warm_up(engine, engine.warm_rows, update)
    return engine


class Model:
    """A model in memory. Use it in one thread at a time; streams may be interleaved in it."""

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
        self.engine_choice: EngineChoice | None = None
        """How `load` chose the engine."""
        self._open_with = open_with
        self._opened = 0  # sequences of requests and conversations
        self._slots = engine.free_slots
        self._progress = progress
        self._profile = self._profile_of_engine()
        self._acceptance = Acceptance()
        self._kept = kept_answers(files, engine.vocab_size, progress) if keep else None
        self._shared = drafter_resources(files, progress)
        self._shared.vocab_size = engine.vocab_size
        self._shared.open_model = self._open_draft_model
        self._share_network()

    def fresh(self) -> "Model":
        """Return another on the same engine, with the same drafters open and nothing learned."""
        other = Model(self.files, self.engine, defaults=self.defaults, progress=self._progress)
        other._shared = replace(self._shared, history=AnswerHistory())
        other._profile = self._profile
        return other

    @property
    def profile(self) -> CostProfile:
        """What calls cost on this machine: measured once, then read from the cache folder."""
        return self._profile.whole()

    def measure_profile(self, *, again: bool = False) -> CostProfile:
        """Return the cost profile, measured now if there is none, or if `again`."""
        return self._profile.whole(again=again)

    @property
    def known_costs(self) -> CostTable | None:
        """Costs of calls, if they were measured; nothing is measured now."""
        return self._profile.known_costs()

    def fix_costs(self) -> None:
        """Keep the cost profile as it is: answers' calls then correct nothing in it."""
        self._profile.fixed = True

    def _profile_of_engine(self) -> ModelProfile:
        folder = cache_dir() / MEASUREMENTS
        return ModelProfile(self.engine, self.files.fingerprint, folder, self._progress)

    def settle(self) -> None:
        """Wait for what runs in the background after answers: the counting of kept ones."""
        if self._kept is not None:
            self._kept.settle()

    def tokens(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Return the prompt as token ids.

        Raises:
            InvalidRequest: an empty prompt, or messages that the chat template refuses.
            ModelError: the model has no chat template and the prompt needs one.

        """
        return self.encode_prompt(prompt, check({"raw": raw}))[0]

    def encode_prompt(self, prompt: Prompt, request: Request) -> tuple[list[int], Request]:
        """See `prompt.encode_prompt`."""
        return encode_prompt(self.files, prompt, request, self.engine.vocab_size)

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Result:
        """Return the whole answer; `Options` has what can be set.

        An answer that reaches the end of the context or of the KV cache ends with `length`.

        Raises:
            InvalidRequest: the prompt or an option cannot be served.
            CacheFull: other streams and conversations leave no KV slots for the prompt.

        """
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.result

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> "Stream":
        """Return a stream: iterate for steps, then read `.result`. Raises as `generate` does."""
        started = perf_counter()
        request = self.request(options)
        tokens, request = self.encode_prompt(prompt, request)
        self.ensure_taps(request)
        request = request.fitted(
            len(tokens), context=self.engine.context_length, free=self.engine.free_slots
        )
        sequence = self.open_sequence()
        try:
            return self.open_stream(
                tokens, request, sequence, started, end=lambda _: self.close_sequence(sequence)
            )
        except BaseException:
            self.close_sequence(sequence)
            raise

    def request(
        self, options: Options, defaults: Defaults | None = None, *, private: bool = False
    ) -> Request:
        """Check options; the drafter `auto` becomes the drafters that this model has.

        Args:
            options: what the caller gives.
            defaults: for the options left out; None: the model's own.
            private: the answer is neither kept nor drafted from kept ones.

        Raises InvalidRequest if an option cannot be served.
        """
        request = check(options, self.defaults if defaults is None else defaults)
        kinds = {*self._shared.shipped}
        if self._kept is not None and self._kept.text is not None and not private:
            kinds.add("kept")
        drafter = request.drafter.resolve(kinds, prediction=bool(request.prediction))
        probe = request.probe and request.probe.resolve(kinds)
        return replace(request, drafter=drafter, probe=probe, private=private)

    def conversation(self, messages: Sequence[Message] = ()) -> Conversation:
        """Return a chat that keeps the KV of its earlier turns; see `Conversation`."""
        return Conversation(self, messages)

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
        return self._profile.exactness(blocks=blocks, cached=cached, shared=shared)

    def taps_for(self, request: Request) -> set[int]:
        """Return the layers whose hidden states the request's drafters read.

        Raises ModelError if a drafter cannot be read.
        """
        specs = filter(None, (request.drafter, request.probe))
        return {tap for spec in specs for tap in drafting.taps(spec, self._shared)}

    def open_drafters(self, drafter: str) -> None:
        """Read and compile what `drafter` needs, so that no request waits for it.

        Raises:
            InvalidRequest: there is no such drafter for this model.
            ModelError: it cannot be read, or does not fit the model.
        """
        spec = DrafterSpec.parse(drafter).resolve(self._shared.shipped)
        for opened in drafting.create(spec, self._shared):
            opened.close()

    def draft_slots(self, drafter: DrafterSpec) -> int | None:
        """Return the KV slots of the drafter's own model, for all requests together.

        None if it has no model of its own, or that is not open.
        """
        return drafting.slots(drafter, self._shared)

    def ensure_taps(self, request: Request) -> None:
        """Open the engine again if the request's drafters need hidden states it does not return."""
        needed = {*self.engine.taps, *self.taps_for(request)}
        if needed == set(self.engine.taps):
            return
        if self._opened or self._open_with is None:
            raise InvalidRequest(
                f"drafter {request.drafter} needs hidden states that this model was loaded "
                "without; name it when loading, or end other answers and conversations first"
            )
        self.engine = self._open_with(tuple(sorted(needed)))
        self._share_network()
        self._profile = self._profile_of_engine()

    def _share_network(self) -> None:
        """Give drafters that run in MLX the engine's embeddings and head."""
        if self.engine.name == "mlx":
            engine: Any = self.engine
            self._shared.mlx, self._shared.networks, self._shared.heads = engine.model, {}, {}

    def _open_draft_model(self, name: str) -> DraftModel:
        """Open another model to draft with. Raises ModelError if its vocabulary differs."""
        files = resolve(name, progress=self._progress)
        ours, theirs = self.files.tokenizer().vocabulary, files.tokenizer().vocabulary
        if ours != theirs:
            differing = sum(theirs.get(token) != number for token, number in ours.items())
            raise ModelError(
                f"{files.name} cannot draft for {self.files.name}: {differing} of {len(ours)} "
                f"tokens are not the same, and it has {len(theirs)}"
            )
        # As many KV slots as the target: all requests of a batch draft at once.
        slots = max(files.context_length, self._slots)
        settings = EngineSettings(min_rows=1, cache_tokens=slots)
        opened = open_engine(files.engine, files.path, files.context_length, settings)
        engine = warmed_up(opened, self._progress)
        folder = cache_dir() / MEASUREMENTS
        cost = load_profile(engine, files.fingerprint, folder, say=self._progress.say).cost
        worth = min(cost(1) / self.profile.cost(1), 1.0)
        return DraftModel(engine, cost, worth, slots=engine.free_slots)

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
        # The time of a drafter is in seconds, and so have calls to be.
        priced = any(drafter.cost(1) for drafter in drafters)
        costs = (lambda: self.profile.cost) if priced else self._profile.costs
        stats = Stats(load_seconds=self.load_seconds, cached_tokens=sequence.length)
        try:
            generation = Generation(
                tokens,
                vocab_size=self.engine.vocab_size,
                context_length=self.engine.context_length,
                sampling=request.sampling,
                stopping=stopping,
                drafters=[*probes, *drafters],
                policy=request.policy_for(costs, acceptance, len(tokens)),
                decode=decode,
                cached=sequence.length,
                constraint=request.constraint,
                logprobs=request.logprobs,
                prompt_logprobs=request.prompt_logprobs,
                text=answer_text(showing(decode, request.shown), stopping.stop, request.thoughts),
                counters=stats,
            )
        except ValueError as error:
            raise InvalidRequest(str(error)) from error

        compare = partial(
            self.exactness, request.drafter, cached=sequence.length > 0, shared=shared
        )
        # Of a small model, before the prompt takes slots.
        compared = None if self._profile.in_parts else compare()

        def learn(stream: Stream) -> None:
            self._acceptance = acceptance
            if request.drafter.uses_earlier_answers:
                self._shared.history.add(stream.answer)

        return Stream(
            self.engine,
            sequence,
            generation,
            request,
            stats,
            model=self.files.name,
            drafter=str(request.drafter),
            exactness=compare if self._profile.in_parts else lambda: compared,
            started=started,
            probes=probes,
            on_end=(
                *(learn, end, partial(self._profile.learn, shared=shared)),
                *(() if keeper is None else (keeper.add,)),
            ),
        )
