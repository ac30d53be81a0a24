"""A loaded model, as Python programs use it: answers, one or many at a time, chats and embeddings.

A single answer runs in the caller's thread; lists of prompts and coroutines share the calls of a
thread (`batching/`). Callers in the package that manage KV themselves use `_request`,
`_open_sequence` and `_open_stream`. Invariant: neither way, nor who else asks, changes a token of
an answer.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from inspect import getdoc
from operator import itemgetter
from time import perf_counter
from typing import TYPE_CHECKING, Any, NoReturn, Self, Unpack, cast, overload
from weakref import WeakSet

import numpy as np
import numpy.typing as npt

from paceline.decoding.costs import CostTable
from paceline.decoding.types import FINAL_NORM
from paceline.drafters import DrafterSpec, DraftKV, Fault
from paceline.engines.base import Closes, Engine, KVSequence
from paceline.engines.costs import StoredCosts, measure
from paceline.engines.exact import BATCH, BLOCK_LENGTH, CHUNKED_PREFILL, PREFIX_CACHE, Compared
from paceline.errors import InvalidRequest
from paceline.models import TOKENIZER, ModelFiles, Progress, TokenBytes, cache_dir
from paceline.options import Options, described
from paceline.runtime.conversation import Conversation
from paceline.runtime.drafting import Drafting
from paceline.runtime.exactness import MEASUREMENTS, Exactness
from paceline.runtime.pooled import NO_EMBEDDINGS, Embedding
from paceline.runtime.prompt import Message, Prompt, Prompts, batch_of, check_ids, encode_prompt
from paceline.runtime.request import Defaults, Request, check, defaults_of, structure
from paceline.runtime.result import Result
from paceline.runtime.stream import Stream
from paceline.system.processes import in_forked_child, use_native_threads
from paceline.system.turns import Turns

if TYPE_CHECKING:
    from paceline.constraints.grammar import Grammars
    from paceline.runtime.batching.batches import AsyncStream, Batches
    from paceline.runtime.batching.request import BatchRequest, Listener

_SMALL_BYTES = 200_000_000  # most that the weights of a small model have


class Model:
    """A model in memory, for any number of threads; a `with` block frees it at its end.

    Answers of `generate` in several threads run one after another, and those of lists and of
    coroutines together. Streams and conversations may be interleaved; a step waits for its turn.
    """

    def __init__(
        self,
        files: ModelFiles,
        engine: Engine,
        *,
        defaults: Defaults | None = None,
        drafting: Drafting | None = None,
        open_with: Callable[[tuple[int, ...]], Engine] | None = None,
    ) -> None:
        """Join an engine and the files it was opened from; `load` is the usual way.

        `open_with` opens the engine again with other taps, for a drafter that needs them.
        """
        self.files = files
        self.defaults = defaults_of(files) if defaults is None else defaults
        self.drafting = drafting or Drafting(files)
        self.load_seconds = 0.0
        self.lock = Turns()
        """Whoever has it may use the engine and the drafters."""
        self._open_with = open_with
        self._batches: Batches | None = None
        self._opened = 0  # sequences of requests and conversations
        self._streams = WeakSet[Stream]()
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

        Raises InvalidRequest for a prompt or an option, and CacheFull if other streams and
        conversations leave no KV slots.
        """
        prompts = batch_of(prompt)
        if prompts is not None:
            requests = [*self._requests(prompts, options)]  # a wrong one is refused before any runs
            return self._together(requests, "prompt")
        prompt = cast("Prompt", prompt)
        with self.lock:
            if not self._batching:
                for _ in (stream := self.stream(prompt, **options)):
                    pass
                return stream.result
        (result,) = self._together([self._batch_request(prompt, options)], None)
        return cast("Result", result)

    def map(
        self, prompts: Iterable[Prompt], **options: Unpack[Options]
    ) -> Iterator[tuple[int, Result]]:
        """Answer prompts together; yield the number of each, from 0, and its result, as it ends.

        Prompts are read as places become free. Raises as `generate` does; an error ends all.
        """
        if isinstance(prompts, str | Mapping):
            raise InvalidRequest("map answers several prompts, and this is one; use generate")
        self._request(options)  # refused now, and not when the first answer is asked for
        return self._as_they_end(self._requests(prompts, options))

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Return a stream: iterate for steps, then read `.result`. Raises as `generate` does."""
        started = perf_counter()
        tokens, request = self._encode_prompt(prompt, self._request(options))
        with self.lock:
            self._open_taps(request)
            context, free = self.engine.context_length, self.engine.free_slots
            request = request.fitted(len(tokens), context=context, free=free)
            sequence = self._open_sequence()

            def end(_: Stream) -> None:
                self._close_sequence(sequence)

            try:
                return self._open_stream(tokens, request, sequence, started, end=end)
            except BaseException:
                self._close_sequence(sequence)
                raise

    @overload
    async def agenerate(self, prompt: Prompt, **options: Unpack[Options]) -> Result: ...

    @overload
    async def agenerate(self, prompt: Prompts, **options: Unpack[Options]) -> list[Result]: ...

    async def agenerate(
        self, prompt: Prompt | Prompts, **options: Unpack[Options]
    ) -> Result | list[Result]:
        """Do as `generate` in a coroutine: answers of several run together."""
        prompts = batch_of(prompt)
        if prompts is None:
            return await self.astream(cast("Prompt", prompt), **options).finish()
        import asyncio

        from paceline.runtime.batching.batches import AsyncStream

        requests = await asyncio.to_thread(lambda: [*self._requests(prompts, options)])
        submit = self._running_batches.submit
        streams = [AsyncStream(partial(submit, request)) for request in requests]
        try:
            async with asyncio.TaskGroup() as group:
                answers = [group.create_task(stream.finish()) for stream in streams]
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        return [answer.result() for answer in answers]

    def astream(self, prompt: Prompt, **options: Unpack[Options]) -> "AsyncStream":
        """Return a stream for a coroutine: `async for` steps, then read `.result`."""
        from paceline.runtime.batching.batches import AsyncStream

        def submit(listener: "Listener") -> "BatchRequest":
            request = self._batch_request(prompt, options)
            return self._running_batches.submit(request, listener)

        return AsyncStream(submit)

    def conversation(self, messages: Sequence[Message] = ()) -> Conversation:
        """Return a chat that keeps the KV of its earlier turns; see `Conversation`."""
        return Conversation(self, messages)

    def open_drafters(self, *drafters: str) -> None:
        """Open drafters now, so that no request waits for one; raises what `load` raises of one."""
        for drafter in dict.fromkeys(drafters):
            self.drafting.open(drafter)

    def settle(self) -> None:
        """Wait for what runs in the background after answers: the counting of kept ones."""
        if self.drafting.kept is not None:
            self.drafting.kept.settle()

    # -- several answers in a call -----------------------------------------------------------------

    @property
    def _batching(self) -> bool:
        """Whether answers of a batch run or wait."""
        return self._batches is not None and self._batches.busy

    @property
    def _running_batches(self) -> "Batches":
        from paceline.runtime.batching.batches import Batches

        with self.lock:
            if self._batches is None:
                self._batches = Batches(self)
            return self._batches

    def _together(self, requests: Sequence["BatchRequest"], noun: str | None) -> list[Any]:
        """The results of requests that run together, in their order."""
        pairs = self._running_batches.as_they_end(iter(requests), noun)
        return [result for _, result in sorted(pairs, key=itemgetter(0))]

    def _requests(self, prompts: Iterable[Prompt], options: Options) -> Iterator["BatchRequest"]:
        self._request(options)  # a wrong option is no fault of the first prompt
        for number, prompt in enumerate(prompts):
            try:
                yield self._batch_request(prompt, options)
            except InvalidRequest as error:
                raise InvalidRequest(f"prompt {number}: {error}") from error

    def _batch_request(self, prompt: Prompt, options: Options) -> "BatchRequest":
        """Return the request for an answer among others; see `_as_they_end`."""
        from paceline.runtime.batching.request import BatchRequest

        tokens, request = self._encode_prompt(prompt, self._request(options))
        with self.lock:
            self._open_taps(request)
        return BatchRequest(tokens, request)

    def _as_they_end(
        self, requests: Iterator["BatchRequest"], at_once: int | None = None
    ) -> Generator[tuple[int, Result], None, None]:
        """Run requests for answers together; see `Batches.as_they_end`."""
        pairs = self._running_batches.as_they_end(requests, "prompt", at_once)
        return cast("Generator[tuple[int, Result], None, None]", pairs)

    # -- texts, tokens and vectors -----------------------------------------------------------------

    def tokens(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """Return the prompt as token ids. Raises as `generate` does."""
        return self._encode_prompt(prompt, check({"raw": raw}))[0]

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Return the text of token ids without control tokens. Raises InvalidRequest."""
        check_ids("detokenize", token_ids, self.engine.vocab_size)
        return self.files.tokenizer.decode(token_ids)

    def _encode_prompt(self, prompt: Prompt, request: Request) -> tuple[list[int], Request]:
        """Do as `prompt.encode_prompt`; ids that are not in the vocabulary are refused, too."""
        tokens, request = encode_prompt(self.files, prompt, request)
        check_ids("the prompt", tokens, self.engine.vocab_size)
        return tokens, request

    def embed(self, text: str | Sequence[str]) -> npt.NDArray[np.float32]:
        """Return the vector of a text, [d] of length 1, or those of several texts, [texts, d].

        Raises InvalidRequest if the model makes no embeddings, or a text is empty or too long.
        """
        texts = [text] if isinstance(text, str) else [*text]
        for number, one in enumerate(texts):
            if not (isinstance(one, str) and one):
                raise InvalidRequest(
                    f"text {number} is {one!r:.60}; expected a string with characters"
                )
        if not texts:
            raise InvalidRequest("there is no text; expected a string, or several")
        encode = self.files.tokenizer.encode
        requests = [self._embedding_request(encode(one, special=True)) for one in texts]
        with self.lock:
            self._ensure_taps({FINAL_NORM}, "embed")
        results: list[Embedding] = self._together(requests, "text")
        vectors = np.stack([result.vector for result in results])
        return vectors[0] if isinstance(text, str) else vectors

    def _embedding_request(self, tokens: Sequence[int]) -> "BatchRequest":
        """Return the request for a text's vector. Raises InvalidRequest if there can be none."""
        from paceline.runtime.batching.request import BatchRequest

        end, pooling = self.files.facts.pooled_end, self.files.facts.pooling
        if pooling is None:
            raise InvalidRequest(f"{self.files.name} {NO_EMBEDDINGS}")
        ended = [] if end is None or (tokens and tokens[-1] == end) else [end]
        request = self._request({"max_tokens": 1, "drafter": "none"})
        return BatchRequest([*tokens, *ended], request, cached=False, pooling=pooling)

    @cached_property
    def _token_bytes(self) -> TokenBytes:
        """The bytes and names of tokens."""
        return TokenBytes(self.files.tokenizer)

    # -- requests and their streams ----------------------------------------------------------------

    @cached_property
    def _grammars(self) -> "Grammars":
        """Compiles what answers are constrained to."""
        from paceline.constraints.grammar import Grammars

        path, stops = self.files.folder / TOKENIZER, self.files.stop_token_ids
        return Grammars(path, vocab_size=self.engine.vocab_size, stop_token_ids=stops)

    def _request(
        self, options: Options, defaults: Defaults | None = None, *, private: bool = False
    ) -> Request:
        """Check options; the drafter `auto` becomes the drafters that this model has.

        An answer that is `private` is neither kept nor drafted from kept ones. Raises
        InvalidRequest if an option cannot be served, and PacelineError in a forked child.
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

    def _open_taps(self, request: Request) -> None:
        """Open the engine again if the request's drafters need hidden states it does not return."""
        self._ensure_taps(self.drafting.taps(request), f"drafter {request.drafter}")

    def _ensure_taps(self, taps: set[int], user: str) -> None:
        """Raise InvalidRequest, which names the taps' `user`, while others use the engine."""
        if taps <= {*self.engine.taps}:
            return
        if self._opened or self._batching or self._open_with is None:
            raise InvalidRequest(
                f"{user} needs hidden states that this model was loaded "
                "without; name it when loading, or end other answers and conversations first"
            )
        self._use(self._open_with(tuple(sorted({*self.engine.taps, *taps}))))

    def _open_sequence(self) -> KVSequence:
        """Open a KV sequence of the engine; `_close_sequence` closes it."""
        self._opened += 1
        return self.engine.open()

    def _close_sequence(self, sequence: KVSequence) -> None:
        """Free the KV blocks of a sequence."""
        self._opened -= 1
        sequence.close()

    def _open_stream(
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

        Of a chat's second turn:

            tokens     5 8 2 9 4 7    the prompt
            sequence   5 8 2          three are cached: the first block is 9 4 7
            drafters   suffix, table  `auto`, as `_request` has resolved it
            policy     asks the one of the two whose draft gains most by the costs of calls
            stream     runs blocks until the answer ends; then `end`, and what was learnt is kept

        Args:
            tokens: the prompt.
            request: of `_request`.
            sequence: a sequence of this model's engine; the caller closes it.
            started: when the request came (`perf_counter`).
            end: called once, when the stream has ended in any way.
            memory: the drafters' own state of the sequence, kept from one stream to the next.
            fault: called when a drafter fails and is silenced; None: its error ends the answer.
            shared: whether calls may have other sequences too.

        Raises InvalidRequest for the prompt or an option, and ModelError for a drafter.
        """
        cost = self.costs.table
        drafters = self.drafting.of_request(request, len(tokens), cost, memory, fault)
        cached = sequence.length > 0
        compare = partial(self._comparisons, request.drafter, cached=cached, shared=shared)
        if self.files.weights_bytes <= _SMALL_BYTES:  # now, before the prompt takes slots
            compared = compare(progress=None if shared else self.drafting.progress)
            compare = partial(lambda: compared)
        stream = Stream(
            self,
            tokens,
            request,
            sequence,
            drafters,
            started=started,
            exactness=compare,
            on_end=(end, lambda _: self.costs.store(), self.drafting.learn),
        )
        self._streams.add(stream)
        return stream

    # -- costs and exactness -----------------------------------------------------------------------

    def measured_costs(self, *, again: bool = False) -> CostTable:
        """Return what calls cost, after calls to learn it if none were seen, or with `again`.

        Raises CacheFull if there are no slots for them.
        """
        if again or not self.costs.known:
            with self.drafting.progress.task("measuring this machine"):
                measure(self.engine, self.costs)
            self.costs.store()
        return self.costs.table()

    def compared(self) -> Mapping[str, Compared]:
        """Return all conditions of exactness, measured now where one is missing."""
        return self._exactness.compared() or {}

    def _comparisons(
        self, drafter: DrafterSpec, progress: Progress | None = None, *, cached: bool, shared: bool
    ) -> Mapping[str, Compared] | None:
        """Return what was compared of the conditions (`engines/exact.py`) an answer depends on.

        None: the KV cache had too few free slots to measure. Without a drafter no block has several
        rows; `cached`: KV of an earlier prompt is used; `shared`: calls may have other sequences
        too, which also divides prompts.
        """
        names = set[str]()
        if not drafter.none or self.engine.min_rows < 2:
            names |= {BLOCK_LENGTH}
        if cached or shared:
            names |= {CHUNKED_PREFILL, PREFIX_CACHE}
        if shared:
            names |= {BATCH}
        compared = self._exactness.compared(names, progress)
        return compared if compared is not None and compared.keys() == names else None

    # -- its life ----------------------------------------------------------------------------------

    def fresh(self) -> "Model":
        """Return another on the same engine, with the same drafters open and nothing learned."""
        drafting = self.drafting.fresh()
        other = Model(self.files, self.engine, defaults=self.defaults, drafting=drafting)
        other.lock = self.lock
        other.costs, other._exactness = self.costs, self._exactness
        return other

    def close(self) -> None:
        """End all answers and free the engine, which models of `fresh` share.

        Further calls do nothing, nor does one in a forked child.
        """
        if in_forked_child():
            return
        if self._batches is not None:
            self._batches.close()
        with self.lock:
            if self._closed:
                return
            for stream in [*self._streams]:
                stream.close()
            engine, closed = self.engine, cast("Any", _Closed(self.files.name))
            self._closed = True
            self.engine = self.costs = self._exactness = self.drafting = closed
            if isinstance(engine, Closes):
                engine.close()


class _Closed:
    """In place of the parts of a closed model: any use of it is refused by name."""

    def __init__(self, model: str) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        raise InvalidRequest(f"{self._model} is closed; load it again")


_ANSWERING = (Model.generate, Model.map, Model.stream, Model.agenerate, Model.astream)
for _method in (*_ANSWERING, Conversation.say):
    _method.__doc__ = f"{getdoc(_method)}\n\nOptions, each a keyword:\n{described()}\n"
