"""A loaded model and the one loop that drives it: blocks to the engine, rows to the generation.

Puts the rooms together for one stream at a time, and is where the clock is: `decoding` has none.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, Unpack, cast

from paceline import drafters as drafting
from paceline.decoding.auto import Acceptance
from paceline.decoding.generation import Generation
from paceline.decoding.reasoning import answer_text
from paceline.drafters import (
    AnswerHistory,
    DrafterSpec,
    DraftModel,
    Fault,
    GuardedDrafter,
    Memory,
    Own,
    Probe,
    Shared,
)
from paceline.engines import ENGINES, EngineSettings, check_settings, open_engine
from paceline.engines.base import Engine, KVSequence
from paceline.engines.invariance import (
    BATCH,
    BLOCK_LENGTH,
    CHUNKED_PREFILL,
    PREFIX_CACHE,
    Compared,
)
from paceline.engines.profile import CostProfile, load_profile
from paceline.errors import CacheFull, InvalidRequest, ModelError
from paceline.models import (
    DEFAULT_MODEL,
    QUIET,
    ModelFiles,
    Progress,
    cache_dir,
    resolve,
    resolve_drafter,
)
from paceline.models.template_process import PROCESS
from paceline.runtime.defaults import Defaults
from paceline.runtime.options import Options, Request, check, defaults_of
from paceline.runtime.reasoning import rendered
from paceline.runtime.result import Result, Stats
from paceline.runtime.stream import Stream

if TYPE_CHECKING:
    from paceline.runtime.conversation import Conversation

Message = Mapping[str, Any]
"""{"role": "user", "content": "..."}"""

Prompt = str | Sequence[Message] | Sequence[int]
"""A user's message, the messages of a chat, or token ids."""


def load(
    name_or_path: str | Path = DEFAULT_MODEL,
    *,
    engine: str | None = None,
    rows: int = 2,
    cache_tokens: int | None = None,
    contexts: int = 1,
    threads: int | None = None,
    compute_units: str | None = None,
    drafters: Sequence[str] = ("auto",),
    generation_config: str = "auto",
    progress: Progress = QUIET,
) -> "Model":
    """Load a model, fetching or converting it first when it is not here.

    Args:
        name_or_path: a name (`smollm2-135m`), the path of a GGUF file or of an OpenVINO folder, or
            a hub name (owner/name).
        engine: who computes: `openvino`, `coreml` or `mlx`; None: the one that the model is for.
        rows: rows a sequence gets in a call at least. 2 is exact; 1 is not (see the guide).
        cache_tokens: slots for keys and values of all sequences; None: `contexts` full contexts, as
            far as 2 GiB go, or for several contexts a quarter of the machine's memory.
        contexts: see `cache_tokens`; for many requests at once.
        threads: CPU threads; None leaves it to the engine.
        compute_units: where Core ML may run the model: `all`, `cpu-only`, `cpu-and-gpu` or
            `cpu-and-ne`; None: `cpu-and-ne`. Off a Mac it changes nothing.
        drafters: those that will be used, so that the engine returns what they learn from. With
            others the engine may have to be opened again, which takes as long as loading.
        generation_config: `auto`: requests that do not say how to sample get what the registry has
            for the model, else what its own files say; `none`: neither, which is greedy.
        progress: told about long work.

    Raises:
        ModelNotFound: there is no such model.
        ModelError: it cannot be fetched, read or run.
        InvalidRequest: a setting is out of range.

    """
    started = perf_counter()
    if generation_config not in ("auto", "none"):
        raise InvalidRequest(f"generation_config is {generation_config!r}; expected auto or none")
    settings = EngineSettings(
        cache_tokens=cache_tokens,
        contexts=contexts,
        min_rows=rows,
        threads=threads,
        compute_units=compute_units,
    )
    if engine is not None:
        check_settings(engine, settings)  # before anything is fetched
    files = _files_for(str(name_or_path), engine, progress)
    if files.chat_template is not None:
        PROCESS.start()  # ready when the model is

    def open_with(taps: tuple[int, ...]) -> Engine:
        wanted = replace(settings, taps=taps)
        return open_engine(files.engine, files.path, files.context_length, wanted)

    shared = shared_by(files, progress)
    taps = {tap for spec in drafters for tap in drafting.taps(spec, shared)}
    defaults = defaults_of(files) if generation_config == "auto" else Defaults()
    opened = open_with(tuple(sorted(taps)))
    model = Model(files, opened, defaults=defaults, progress=progress, open_with=open_with)
    files.tokenizer()  # read now rather than with the first prompt
    model.load_seconds = perf_counter() - started
    return model


def _files_for(name: str, engine: str | None, progress: Progress) -> ModelFiles:
    """The model that is called so, in its form for an engine.

    Raises:
        InvalidRequest: there is no such engine, or the model is for another one.
    """
    if engine is not None and engine not in ENGINES:
        raise InvalidRequest(f"no engine is called {engine!r}; expected {', '.join(ENGINES)}")
    if engine == "mlx":
        from paceline.engines.mlx.model import require_mlx_lm

        require_mlx_lm()
    return resolve(name, progress=progress, engine=engine)


def shared_by(files: ModelFiles, progress: Progress) -> Shared:
    """What the drafters of all requests to a model have in common."""
    return Shared(
        target=files.name,
        shipped=drafting.shipped(files.name),
        find=lambda name: resolve_drafter(name, progress),
        graph=files.path,
    )


class Model:
    """A model in memory. Not for several threads at once; streams may be interleaved in one."""

    def __init__(
        self,
        files: ModelFiles,
        engine: Engine,
        *,
        defaults: Defaults | None = None,
        progress: Progress = QUIET,
        open_with: Callable[[tuple[int, ...]], Engine] | None = None,
    ) -> None:
        """Put an engine and the files it was opened from together; `load` is the usual way.

        `defaults` are for requests that do not say; None: the registry's and the model's own.
        `open_with` opens the engine again with other taps, for a drafter that needs them.
        """
        self.files = files
        self.engine = engine
        self.defaults = defaults_of(files) if defaults is None else defaults
        self.load_seconds = 0.0
        self._open_with = open_with
        self._opened = 0  # sequences of requests and conversations
        self._slots = engine.free_slots
        self._progress = progress
        self._acceptance = Acceptance()
        self._shared = shared_by(files, progress)
        self._shared.vocab_size = engine.vocab_size
        self._shared.open_model = self._open_small
        self._lend()

    def fresh(self) -> "Model":
        """Another on the same engine and with the same drafters open, that has learnt nothing."""
        other = Model(self.files, self.engine, defaults=self.defaults, progress=self._progress)
        other._shared = replace(self._shared, corpus=AnswerHistory())
        return other

    @cached_property
    def measurement(self) -> CostProfile:
        """What calls cost on this machine; measured at the first use ever, then kept."""
        return self.measure()

    def measure(self, *, again: bool = False) -> CostProfile:
        """The measurement for this model on this machine, made when there is none, or `again`."""
        found = self._measured(self.engine, self.files, again=again)
        self.__dict__["measurement"] = found
        return found

    def _measured(self, engine: Engine, files: ModelFiles, *, again: bool = False) -> CostProfile:
        return load_profile(
            engine,
            files.fingerprint,
            cache_dir() / "measurements",
            again=again,
            before=lambda: self._progress.say("measuring this machine, once for this model"),
        )

    def tokens(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """The prompt as token ids.

        Raises:
            InvalidRequest: an empty prompt, or messages that the chat template refuses.
            ModelError: the model has no chat template and the prompt needs one.

        """
        return self.prompted(prompt, check({"raw": raw}))[0]

    def prompted(self, prompt: Prompt, request: Request) -> tuple[list[int], Request]:
        """The prompt as token ids, and the request with the form of the thoughts to expect.

        Raises:
            InvalidRequest: an empty prompt, messages that the chat template refuses, or one that
                cannot turn thinking on or off.
            ModelError: the model has no chat template and the prompt needs one.

        """
        if not prompt:
            raise InvalidRequest("the prompt is empty; expected some text or a message")
        tokenizer = self.files.tokenizer()
        bare = request.raw if isinstance(prompt, str) else isinstance(prompt[0], int)
        if bare and (request.think is not None or request.template_kwargs):
            raise InvalidRequest(
                "think and template_kwargs are for the chat template; give messages, or leave them "
                "and raw away"
            )
        if isinstance(prompt, str):
            if request.raw:
                return tokenizer.encode(prompt, special=True), request
            prompt = [{"role": "user", "content": prompt}]
        if all(isinstance(item, int) for item in prompt):
            return list(cast("Sequence[int]", prompt)), request
        messages = cast("Sequence[Message]", prompt)
        variables = dict(request.template_kwargs)
        if request.think is not None:
            variables = {**self.files.thinking().switch(request.think), **variables}
        text, thoughts = rendered(self.files, messages, variables)
        if request.constraint is None:  # a form leaves no room for thoughts
            request = replace(request, thoughts=thoughts)
        return tokenizer.encode(text, special=True), request

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Result:
        """The whole answer. See `Options` for what can be set.

        An answer that the context or the cache cannot hold ends with `length`.

        Raises:
            InvalidRequest: the prompt or an option cannot be served.
            CacheFull: other streams and conversations leave the prompt no room in the cache.

        """
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        return stream.result

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> "Stream":
        """The answer as it comes: iterate, then read `.result`. Raises what `generate` raises."""
        started = perf_counter()
        request = self.request(options)
        tokens, request = self.prompted(prompt, request)
        self._make_ready(request)
        request = request.fitted(
            len(tokens), context=self.engine.context_length, free=self.engine.free_slots
        )
        slots = self._open()
        try:
            return self.begin(tokens, request, slots, started, end=lambda _: self._close(slots))
        except BaseException:
            self._close(slots)
            raise

    def request(self, options: Options) -> Request:
        """What options ask of this model: the registry and its own settings say the rest.

        Raises:
            InvalidRequest: an option cannot be served.
        """
        return check(options, self.defaults)

    def conversation(self, messages: Sequence[Message] = ()) -> "Conversation":
        """A chat that keeps the keys and values of its earlier turns; see `Conversation`."""
        from paceline.runtime.conversation import Conversation

        return Conversation(self, messages)

    def exactness(
        self, drafter: str, *, cached: bool = False, shared: bool = False
    ) -> Mapping[str, Compared] | None:
        """What was measured here of the conditions that such an answer is computed under.

        Args:
            drafter: `none` alone has no blocks of several rows.
            cached: whether slots of an earlier prompt are used.
            shared: whether other sequences may be in the same calls, which also cut prompts.

        Returns:
            Condition (see `engines/invariance.py`) -> what was compared. None: it could not be
            measured beside what the cache holds.
        """
        names = {
            BLOCK_LENGTH: drafter != "none" or self.engine.min_rows < 2,
            CHUNKED_PREFILL: cached or shared,
            PREFIX_CACHE: cached or shared,
            BATCH: shared,
        }
        if not any(names.values()):
            return {}
        try:
            found = self.measurement.compared
        except CacheFull:
            return None
        return {name: each for name, each in found.items() if names[name]}

    def taps_for(self, request: Request) -> set[int]:
        """The layers whose hidden states the request's drafters look at.

        Raises:
            ModelError: a drafter cannot be read.
        """
        specs = filter(None, (request.drafter, request.probe))
        return {tap for spec in specs for tap in drafting.taps(spec, self._shared)}

    def open_drafters(self, drafter: str) -> None:
        """Open what `drafter` reads from disk and compiles, so that no request waits for it.

        Raises:
            InvalidRequest: there is no such drafter for this model.
            ModelError: it cannot be read, or does not fit the model.
        """
        for made in drafting.create(drafter, self._shared):
            made.close()

    def draft_slots(self, drafter: DrafterSpec) -> int | None:
        """KV slots for all requests together that `drafter` has, in its own model.

        None where it has no model of its own, or one that is not open.
        """
        return drafting.slots(drafter, self._shared)

    def _make_ready(self, request: Request) -> None:
        """See to it that the engine returns what the request's drafters learn from."""
        needed = {*self.engine.taps, *self.taps_for(request)}
        if needed == set(self.engine.taps):
            return
        if self._opened or self._open_with is None:
            raise InvalidRequest(
                f"drafter {request.drafter} needs hidden states that this model was loaded "
                "without; name it when loading, or end other answers and conversations first"
            )
        self.engine = self._open_with(tuple(sorted(needed)))
        self._lend()
        self.__dict__.pop("measurement", None)

    def _lend(self) -> None:
        """Let drafters that run in MLX have parts of the engine's model, and none of another's."""
        if self.engine.name == "mlx":
            engine: Any = self.engine
            self._shared.mlx, self._shared.networks = engine.model, {}

    def _open_small(self, name: str) -> DraftModel:
        """Another model to draft with.

        Raises:
            ModelError: its vocabulary is another.
        """
        files = resolve(name, progress=self._progress)
        ours, theirs = self.files.tokenizer().vocabulary, files.tokenizer().vocabulary
        if ours != theirs:
            differing = sum(theirs.get(token) != number for token, number in ours.items())
            raise ModelError(
                f"{files.name} cannot draft for {self.files.name}: {differing} of {len(ours)} "
                f"tokens are not the same, and it has {len(theirs)}"
            )
        # As many slots as the target has: requests that share its calls draft at once, too.
        slots = max(files.context_length, self._slots)
        settings = EngineSettings(min_rows=1, cache_tokens=slots)
        engine = open_engine(files.engine, files.path, files.context_length, settings)
        cost = self._measured(engine, files).cost
        worth = min(cost(1) / self.measurement.cost(1), 1.0)
        return DraftModel(engine, cost, worth, slots=engine.free_slots)

    def _open(self) -> KVSequence:
        self._opened += 1
        return self.engine.open()

    def _close(self, slots: KVSequence) -> None:
        self._opened -= 1
        slots.close()

    def begin(
        self,
        tokens: Sequence[int],
        request: Request,
        slots: KVSequence,
        started: float,
        *,
        end: Callable[[Stream], None],
        memory: Memory | None = None,
        fault: Fault | None = None,
        shared: bool = False,
    ) -> Stream:
        """A stream over `slots`, whose first ones hold the beginning of `tokens` already.

        For those who look after slots themselves; others call `stream`.

        Args:
            tokens: the prompt.
            request: how to answer it.
            slots: a sequence of this model's engine; whoever opened it closes it.
            started: when the request came (`perf_counter`).
            end: called once, when the stream has ended in any way.
            memory: what drafters know of the sequence already, and will.
            fault: called with a drafter's name and error when one fails and is silenced; None: what
                a drafter raises ends the answer.
            shared: whether other sequences may be in the same calls.

        Raises:
            InvalidRequest: the prompt or an option cannot be served.
            ModelError: a drafter cannot be read or does not fit the model.
        """
        acceptance = self._acceptance.discounted()
        spec = request.drafter.resolve(self._shared.shipped, prediction=bool(request.prediction))
        prediction = request.prediction[: self.engine.context_length]
        own = Own(Memory() if memory is None else memory, prediction, len(tokens))
        chosen = drafting.create(spec, self._shared, own)
        if fault is not None:
            chosen = [GuardedDrafter(each, fault) for each in chosen]
        watched = drafting.create(request.probe, self._shared) if request.probe else []
        probes = [Probe(drafter, request.max_block - 1) for drafter in watched]
        stopping = request.stopping(self.files.stop_token_ids)
        decode = self.files.tokenizer().decode
        stats = Stats(load_seconds=self.load_seconds, cached_tokens=slots.length)
        try:
            generation = Generation(
                tokens,
                vocab_size=self.engine.vocab_size,
                context_length=self.engine.context_length,
                sampling=request.sampling,
                stopping=stopping,
                drafters=[*probes, *chosen],  # probes propose nothing, so that the next is asked
                policy=request.policy_for(lambda: self.measurement.cost, acceptance, len(tokens)),
                decode=decode,
                cached=slots.length,
                constraint=request.constraint,
                logprobs=request.logprobs,
                prompt_logprobs=request.prompt_logprobs,
                text=answer_text(decode, stopping.stop, request.thoughts),
                counters=stats,
            )
        except ValueError as error:
            raise InvalidRequest(str(error)) from error

        def learn(stream: Stream) -> None:
            self._acceptance = acceptance
            if spec.uses_earlier_answers:
                self._shared.corpus.add(stream.answer)

        return Stream(
            self.engine,
            slots,
            generation,
            request,
            stats,
            model=self.files.name,
            drafter=str(spec),
            exactness=self.exactness(str(spec), cached=slots.length > 0, shared=shared),
            started=started,
            probes=probes,
            on_end=(learn, end),
        )
