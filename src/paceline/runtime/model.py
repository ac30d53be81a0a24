"""A loaded model for Python programs: answers, one or many at a time, chats and embeddings.

Every answer is a request to the model's one `Scheduler`, whose thread drives the engine, and comes
back as events. Invariant: neither the entry point nor other callers change a token of an answer.
"""

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from inspect import getdoc
from operator import itemgetter
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar, Unpack, cast, overload

import numpy as np
import numpy.typing as npt

from paceline.decoding.costs import CostTable
from paceline.decoding.generation import Target
from paceline.decoding.types import FINAL_NORM
from paceline.drafters import DrafterSpec, Fault
from paceline.engines.base import Engine, KVSequence
from paceline.engines.costs import StoredCosts, measure
from paceline.engines.exact import BATCH, CHUNKED_PREFILL, PREFIX_CACHE, RowComparison
from paceline.errors import InvalidRequest
from paceline.models import TOKENIZER, ModelFiles, TokenBytes, cache_dir
from paceline.options import Options, described
from paceline.runtime.answer import Answer
from paceline.runtime.conversation import Conversation
from paceline.runtime.decisions import (
    Decision,
    DecisionJob,
    Decisions,
    encode_questions,
    read_questions,
    shared_input,
)
from paceline.runtime.drafting import Drafting
from paceline.runtime.embedding import NO_EMBEDDINGS, Embedding, EmbeddingJob
from paceline.runtime.exactness import MEASUREMENTS, Exactness
from paceline.runtime.prompt import Message, Prompt, Prompts, batch_of, check_ids, encode_prompt
from paceline.runtime.renamed import renamed
from paceline.runtime.request import (
    Defaults,
    Request,
    check,
    defaults_of,
    draw_seed,
    structure,
)
from paceline.runtime.result import Result
from paceline.system.processes import in_forked_child, use_native_threads

if TYPE_CHECKING:
    from paceline.constraints.grammar import Grammars
    from paceline.runtime.batching.prefix_cache import CachedPrefix
    from paceline.runtime.batching.prompt_store import PromptStore
    from paceline.runtime.batching.request import BatchRequest, Listener
    from paceline.runtime.batching.scheduler import Scheduler
    from paceline.runtime.stream import AsyncStream, Stream

_T = TypeVar("_T")

_SMALL_BYTES = 200_000_000  # maximum weights of a small model


class Model:
    """A model in memory, for any number of threads; a `with` block frees it at its end.

    Concurrent answers for several threads, coroutines and streams run together. An answer uses the
    KV cache of earlier prompts that begin with the same tokens.
    """

    def __init__(
        self,
        files: ModelFiles,
        engine: Engine,
        *,
        defaults: Defaults | None = None,
        drafting: Drafting | None = None,
        open_with: Callable[[tuple[int, ...]], Engine] | None = None,
        shares_with: "Model | None" = None,
    ) -> None:
        """Join an engine and the files it was opened from; `load` is the usual way.

        `open_with` opens the engine again with other taps, for a drafter that needs them.
        `shares_with` is the model that owns the engine; None: this one does.
        """
        self.files = files
        self.defaults = defaults_of(files) if defaults is None else defaults
        self.drafting = drafting or Drafting(files)
        self.load_seconds = 0.0
        self._open_with, self._owner = open_with, shares_with
        self._scheduler: Scheduler | None = None
        self._guard = threading.RLock()  # while the scheduler or the engine changes
        self._closed = False
        self._use(engine)

    def _use(self, engine: Engine) -> None:
        self.engine = engine
        folder, fingerprint = cache_dir() / MEASUREMENTS, self.files.fingerprint
        self.costs = StoredCosts(engine, fingerprint, self.files.weights_bytes, folder)
        self._exactness = Exactness(engine, fingerprint, folder)
        self.drafting.use(engine, self.costs.table)

    def __reduce__(self) -> NoReturn:
        raise InvalidRequest(
            f"{self.files.name} cannot be pickled or copied: its weights are in this process; send "
            "its name or path, and load it there"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.engine.context_length} tokens of context"
        return f"<Model {self.files.name} on {self.files.engine}: {state}>"

    # -- answers -----------------------------------------------------------------------------------

    @overload
    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Result: ...

    @overload
    def generate(self, prompt: Prompts, **options: Unpack[Options]) -> list[Result]: ...

    def generate(
        self, prompt: Prompt | Prompts, **options: Unpack[Options]
    ) -> Result | list[Result]:
        """Return the whole answer, or those to a list of prompts, which run together.

        An answer that reaches the end of the context or of the KV cache ends with `length`.

        Raises InvalidRequest for a prompt or an option.
        """
        prompts = batch_of(prompt)
        if prompts is None:
            (result,) = self._together([self._batch_request(cast("Prompt", prompt), options)], None)
            return cast("Result", result)
        requests = [*self._requests(prompts, options)]  # an invalid one is rejected before any runs
        return self._together(requests, "prompt")

    def as_completed(
        self, prompts: Iterable[Prompt], **options: Unpack[Options]
    ) -> Iterator[tuple[int, Result]]:
        """Answer prompts together; yield the index of each, and its result, as it completes.

        Prompts are read as running ones end. Raises as `generate` does; an error ends all.
        """
        if isinstance(prompts, str | Mapping):
            raise InvalidRequest(
                "as_completed answers several prompts, and this is one; use generate"
            )
        from paceline.runtime.stream import results_of

        return results_of(self._submit, self._requests(prompts, options), "prompt")

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> "Stream":
        """Return a stream: iterate for steps, then read `.result`. Raises as `generate` does."""
        from paceline.runtime.stream import Stream

        return Stream(self._batch_request(prompt, options), self._submit)

    @overload
    async def agenerate(self, prompt: Prompt, **options: Unpack[Options]) -> Result: ...

    @overload
    async def agenerate(self, prompt: Prompts, **options: Unpack[Options]) -> list[Result]: ...

    async def agenerate(
        self, prompt: Prompt | Prompts, **options: Unpack[Options]
    ) -> Result | list[Result]:
        """Do as `generate` in a coroutine: answers of several coroutines run together."""
        prompts = batch_of(prompt)
        if prompts is None:
            return await self.astream(cast("Prompt", prompt), **options).finish()
        import asyncio

        from paceline.runtime.stream import AsyncStream

        requests = await asyncio.to_thread(lambda: [*self._requests(prompts, options)])
        streams = [AsyncStream(self._submit, partial(replace, made)) for made in requests]
        try:
            async with asyncio.TaskGroup() as group:
                answers = [group.create_task(stream.finish()) for stream in streams]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [answer.result() for answer in answers]

    def astream(self, prompt: Prompt, **options: Unpack[Options]) -> "AsyncStream":
        """Return a stream for a coroutine: `async for` steps, then read `.result`."""
        from paceline.runtime.stream import AsyncStream

        return AsyncStream(self._submit, partial(self._batch_request, prompt, options))

    def conversation(self, messages: Sequence[Message] = ()) -> Conversation:
        """Return a chat of several turns; see `Conversation`."""
        return Conversation(self, messages)

    def open_drafters(self, *drafters: str) -> None:
        """Open drafters now, so that no request waits for one. Raises as `load` does."""
        for drafter in dict.fromkeys(drafters):
            self.drafting.open(DrafterSpec.parse(drafter))

    def flush(self) -> None:
        """Wait for background work after answers: counting the answer history."""
        if self.drafting.kept is not None:
            self.drafting.kept.flush()

    # -- the scheduler -----------------------------------------------------------------------------

    @property
    def scheduler(self) -> "Scheduler":
        """The scheduler that runs this model's requests, started by the first of them."""
        if self._owner is not None:
            return self._owner.scheduler
        use_native_threads()
        with self._guard:
            _ = self.engine.name  # raises an error if the model is closed
            scheduler = self._scheduler
            if scheduler is None or scheduler.draining:
                scheduler = self.open_scheduler()
                scheduler.start()
            return scheduler

    def open_scheduler(
        self,
        *,
        max_waiting: int = sys.maxsize,
        max_running: int | None = None,
        store: "PromptStore | None" = None,
    ) -> "Scheduler":
        """Replace the scheduler with one with a server's limits and store; `start` it."""
        from paceline.runtime.batching.scheduler import Scheduler

        owner = self._owner or self
        with owner._guard:
            if owner._scheduler is not None:
                owner._scheduler.close()
            owner._scheduler = Scheduler(
                owner, max_waiting=max_waiting, max_running=max_running, store=store
            )
            return owner._scheduler

    @property
    def max_length(self) -> int:
        """The maximum tokens of prompt and answer together."""
        scheduler = (self._owner or self)._scheduler or self.scheduler  # even one that is draining
        return scheduler.admission.max_length

    def _submit(self, request: "BatchRequest", listener: "Listener") -> "BatchRequest":
        owner = self._owner or self
        with owner._guard:  # a scheduler that is replaced now would end the request
            drafter = request.request.drafter
            self._ensure_taps(self.drafting.taps(request.request), f"drafter {drafter}")
            return owner.scheduler.submit(request, listener)

    def _together(self, requests: Sequence["BatchRequest"], noun: str | None) -> list[Any]:
        """Return the results of requests that run together, in their order."""
        from paceline.runtime.stream import results_of

        pairs = results_of(self._submit, iter(requests), noun)
        return [result for _, result in sorted(pairs, key=itemgetter(0))]

    def _requests(self, prompts: Iterable[Prompt], options: Options) -> Iterator["BatchRequest"]:
        """Check the options, once; then read prompts as their requests are taken."""
        first = self._request(options)

        def requests() -> Iterator["BatchRequest"]:
            for number, prompt in enumerate(prompts):
                try:
                    request = self._renewed(first, options) if number else first
                    yield self._batch_request(prompt, options, request)
                except InvalidRequest as error:
                    raise InvalidRequest(f"prompt {number}: {error}") from error

        return requests()

    def _batch_request(
        self, prompt: Prompt, options: Options, request: Request | None = None
    ) -> "BatchRequest":
        """Return the request for an answer; `request` is the earlier result of checking `options`.

        Raises as `generate` does.
        """
        from paceline.runtime.batching.request import BatchRequest

        started = perf_counter()
        tokens, request = self._encode_prompt(prompt, request or self._request(options))
        cached = self._owner is None  # models of `without_history` do not use earlier KV
        return BatchRequest(self, tokens, request, cached=cached, started=started)

    # -- texts, tokens and vectors -----------------------------------------------------------------

    def tokens(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Return the prompt as token ids. Raises as `generate` does."""
        return self._encode_prompt(prompt, check({"raw": raw}))[0]

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids without special tokens. Raises InvalidRequest."""
        check_ids("detokenize", token_ids, self.engine.vocab_size)
        return self.files.tokenizer.decode(token_ids)

    def _encode_prompt(self, prompt: Prompt, request: Request) -> tuple[list[int], Request]:
        """Do as `prompt.encode_prompt`; ids outside the vocabulary are also rejected."""
        tokens, request = encode_prompt(self.files, prompt, request)
        check_ids("the prompt", tokens, self.engine.vocab_size)
        return tokens, request

    def embed(self, text: str | Sequence[str]) -> npt.NDArray[np.float32]:
        """Return the vector of a text, [d] of length 1, or those of several texts, [texts, d].

        Raises InvalidRequest if the model has no embeddings, or a text is empty or too long.
        """
        texts = [text] if isinstance(text, str) else [*text]
        for number, one in enumerate(texts):
            if not (isinstance(one, str) and one):
                raise InvalidRequest(
                    f"text {number} is {one!r:.60}; expected a string with characters"
                )
        if not texts:
            raise InvalidRequest("the list of texts is empty; expected one or more strings")
        encode = self.files.tokenizer.encode
        requests = [self._embedding_request(encode(one, special=True)) for one in texts]
        self._ensure_taps({FINAL_NORM}, "embed")
        results: list[Embedding] = self._together(requests, "text")
        vectors = np.stack([result.vector for result in results])
        return vectors[0] if isinstance(text, str) else vectors

    def _embedding_request(self, tokens: Sequence[int]) -> "BatchRequest":
        """Return the request for a text's vector. Raises InvalidRequest if it is not possible."""
        from paceline.runtime.batching.request import BatchRequest

        end, pooling = self.files.facts.pooled_end, self.files.facts.pooling
        if pooling is None:
            raise InvalidRequest(f"{self.files.name} {NO_EMBEDDINGS}")
        ended = [] if end is None or (tokens and tokens[-1] == end) else [end]
        request = self._request({"max_tokens": 1, "drafter": "none"})
        text = [*tokens, *ended]

        def open_job(sequence: KVSequence, _: Callable[[], None]) -> EmbeddingJob:
            return EmbeddingJob(sequence, text, pooling)

        return BatchRequest(self, text, request, cached=False, open_job=open_job)

    # -- decisions ---------------------------------------------------------------------------------

    def decide(
        self, input: str | Sequence[Message], questions: Sequence[Mapping[str, Any]]
    ) -> Decisions:
        """Answer 1 to 400 questions about a text, or about the messages of a chat.

        Questions have OpenAI's format: a `predicate` with `instructions`, a `choice` that also has
        `choices`, and a `score` that has `levels`. Raises InvalidRequest, which names the field.
        """
        (result,) = self._together([self._decision_request(input, questions)], None)
        return cast("Decisions", result)

    def _decision_request(
        self, input: str | Sequence[Message], questions: Any, *, parse_special: bool = False
    ) -> "BatchRequest":
        """Return the request for decisions. Raises as `decide` does."""
        from paceline.runtime.batching.request import BatchRequest

        request = self._request({"drafter": "none", "think": False, "parse_special": parse_special})
        asked = encode_questions(self.files, input, read_questions(questions), request)
        tokens, longest = shared_input(asked), max(one.length for one in asked)
        if longest > self.max_length:
            raise InvalidRequest(
                f"input: has {longest} tokens with its longest question, and the context holds "
                f"{self.max_length}; shorten it"
            )
        request, decided = replace(request, max_tokens=longest - len(tokens)), list[Decision]()

        def open_job(sequence: KVSequence, make_room: Callable[[], None]) -> DecisionJob:
            def exact() -> bool:
                names = {PREFIX_CACHE, CHUNKED_PREFILL, BATCH}
                return self._exactness.holds(self._exactness.evidence(names, make_room), longest)

            return DecisionJob(sequence, asked, decided, self.files, exact)

        return BatchRequest(self, tokens, request, cached=self._owner is None, open_job=open_job)

    @property
    def _target(self) -> Target:
        """The vocabulary, context and texts for the generation of answers."""
        return Target(
            self.engine.vocab_size,
            self.engine.context_length,
            self.files.tokenizer.continuation,
            self._token_bytes.name,
        )

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        return TokenBytes(self.files.tokenizer)

    # -- requests and their answers ----------------------------------------------------------------

    @cached_property
    def _grammars(self) -> "Grammars":
        from paceline.constraints.grammar import Grammars

        path, stops = self.files.folder / TOKENIZER, self.files.stop_token_ids
        return Grammars(path, vocab_size=self.engine.vocab_size, stop_token_ids=stops)

    def _request(
        self, options: Options, defaults: Defaults | None = None, *, private: bool = False
    ) -> Request:
        """Check options; the drafter `auto` becomes this model's drafters.

        A `private` answer is neither saved nor drafted from saved ones. Raises InvalidRequest if
        an option cannot be served, and PacelineError in a forked child.
        """
        use_native_threads()
        request = check(options, self.defaults if defaults is None else defaults)
        resolve = partial(self.drafting.resolve, private=private)
        return replace(
            request,
            drafter=resolve(request.drafter, prediction=bool(request.prediction)),
            probe=request.probe and resolve(request.probe),
            private=private,
            constraint=structure(options, lambda: self._grammars) or request.constraint,
        )

    def _renewed(self, request: Request, options: Options) -> Request:
        """Return a request for another answer: its seed is drawn if none is given."""
        sampling = request.sampling
        if options.get("seed") is None:
            sampling = replace(sampling, seed=draw_seed())
        constraint = structure(options, lambda: self._grammars) or request.constraint
        return replace(request, sampling=sampling, constraint=constraint)

    def _ensure_taps(self, taps: set[int], user: str) -> None:
        """Open the engine again if a drafter, or `embed`, needs hidden states it does not return.

        Raises InvalidRequest, which names the `user`, while answers run.
        """
        if taps <= {*self.engine.taps}:
            return
        with self._guard:
            scheduler = self._scheduler
            if self._open_with is None or (scheduler is not None and scheduler.unfinished):
                raise InvalidRequest(
                    f"{user} needs hidden states that this model was loaded without; name it when "
                    "loading, or end other answers first"
                )
            if scheduler is not None:
                scheduler.close()
                self._scheduler = None
            self._use(self._open_with(tuple(sorted({*self.engine.taps, *taps}))))

    def _open_answer(
        self,
        queued: "BatchRequest",
        prefix: "CachedPrefix",
        fault: Fault,
        make_room: Callable[[], None],
    ) -> Answer:
        """Return the answer to an admitted request, on the sequence that has its cached prefix.

        For example, a chat's second turn:

            tokens     5 8 2 9 4 7    the prompt
            sequence   5 8 2          three are cached: the first block is 9 4 7
            drafters   suffix, table  `auto`, as `_request` has resolved it
            policy     selects the one whose draft gains most, by forward-pass costs
            answer     runs blocks until it ends; then drafters and costs learn from it

        `fault` is called when a drafter fails and is disabled; `make_room` frees the slots of idle
        KV for the measurement of exactness. Raises InvalidRequest for the prompt or an option, and
        ModelError for a drafter.
        """
        drafters = self.drafting.of_request(queued, prefix.memory, fault)
        answer = Answer(queued, prefix.sequence, drafters, make_room)
        if self.files.weights_bytes <= _SMALL_BYTES:  # now, before the prompt takes slots
            answer.compare(self.drafting.progress)
        return answer

    # -- costs and exactness -----------------------------------------------------------------------

    def measured_costs(self, *, again: bool = False) -> CostTable:
        """Return the costs of forward passes, measured now if none are known, or with `again`.

        Raises CacheFull if there are no slots for them.
        """
        if again or not self.costs.is_known:
            make_room = self.scheduler.prefix_cache.clear

            def measured() -> None:
                make_room()
                measure(self.engine, self.costs)

            with self.drafting.progress.task("measuring this machine"):
                self.call(measured)
            self.costs.store()
        return self.costs.table()

    def call(self, function: Callable[[], _T]) -> _T:
        """Call a function that uses the engine, between the forward passes of answers."""
        return self.scheduler.call(function)

    def exactness_report(self) -> Mapping[str, RowComparison]:
        """Return all conditions of exactness, measured now where one is missing."""
        make_room = self.scheduler.prefix_cache.clear
        return self.call(partial(self._exactness.comparisons, make_room=make_room)) or {}

    # -- its life ----------------------------------------------------------------------------------

    def without_history(self) -> "Model":
        """Return a model on the same engine and drafters, without cached prompts or history."""
        owner = self._owner or self
        drafting = self.drafting.without_history()
        other = Model(
            self.files, self.engine, defaults=self.defaults, drafting=drafting, shares_with=owner
        )
        other.costs, other._exactness = self.costs, self._exactness
        return other

    def close(self) -> None:
        """End all answers and free the engine, which models of `without_history` share.

        Further calls do nothing, nor does one in a forked child.
        """
        if in_forked_child():
            return
        if self._owner is not None:
            self._owner.close()
        with self._guard:
            if self._closed:
                return
            if self._scheduler is not None:
                self._scheduler.cancel_all()
                self._scheduler.close()
            engine, closed = self.engine, cast("Any", _Closed(self.files.name))
            self._closed = True
            self.engine = self.costs = self._exactness = self.drafting = closed
            if free := getattr(engine, "close", None):  # resources outside Python
                free()

    map = renamed("map", as_completed)
    settle = renamed("settle", flush)
    compared = renamed("compared", exactness_report)
    fresh = renamed("fresh", without_history)


class _Closed:
    """Replaces the parts of a closed model: any use raises an error with the model's name."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        raise InvalidRequest(f"{self._model} is closed; load it again")


_ANSWERING = (Model.generate, Model.as_completed, Model.stream, Model.agenerate, Model.astream)
for _method in (*_ANSWERING, Conversation.send):
    _method.__doc__ = f"{getdoc(_method)}\n\nOptions, each a keyword:\n{described()}\n"
