"""What is served, and how a request for it becomes work for the scheduler.

Knows the model, its tokenizer and template, grammars and settings. Knows nothing of HTTP or of how
an answer is written down. The rule: nothing that a client says names a file here.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

from paceline.constraints.grammar import Grammars
from paceline.constraints.tool_calls import literal
from paceline.decoding.reasoning import Thoughts
from paceline.decoding.types import Constraint
from paceline.errors import ModelError
from paceline.models.manifest import TOKENIZER
from paceline.models.token_bytes import Words
from paceline.runtime.options import Options, Request, check
from paceline.runtime.reasoning import Rendered, rendered
from paceline.server.api.bodies import NamedTool, Prediction, Tool
from paceline.server.api.errors import Refused, too_long, unknown_model
from paceline.server.api.schema import Common, StructuredOutputs
from paceline.server.scheduler import Scheduler
from paceline.server.settings import Settings
from paceline.server.stream_text import Answer

log = logging.getLogger("paceline.server")

_GLANCE = 16
"""Characters for each token of the context that say whether a long text may fit at all."""

_T = TypeVar("_T")

_FREE = ("suffix", "recycle", "table", "prediction")
"""Parts of a drafter that anybody may ask for; `ngram` too, with options. None opens a file that
the server was not started with."""

_FALLBACK = {"temperature": 1.0}
"""What OpenAI has where neither a request nor registry nor model says."""

_NUCLEUS_OF_ONE = 1e-9
"""What OpenAI's clients mean by a top_p of 0."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One answer that is wanted."""

    tokens: list[int]
    request: Request
    salt: str = ""
    cached: bool = True
    silent: bool = False
    """Whether the prompt is all that is to be computed."""
    place: int = 0
    """Which of the answers to its prompt it is."""


class Watch(Protocol):
    """Is told what comes of requests, in the event loop: it must be quick, and not raise."""

    def answered(self, ask: Ask, answer: Answer) -> None:
        """An answer has ended."""
        ...

    def refused(self, error: Refused) -> None:
        """A request ends with an error, also in the middle, or because its client has gone."""
        ...


class Nobody:
    """Does not look."""

    def answered(self, ask: Ask, answer: Answer) -> None:
        """An answer has ended."""

    def refused(self, error: Refused) -> None:
        """A request ends with an error."""


class Service:
    """One model for many clients. Its methods may be called from several threads."""

    def __init__(self, scheduler: Scheduler, settings: Settings) -> None:
        """Serve the scheduler's model."""
        files = scheduler.model.files
        self.scheduler = scheduler
        self.settings = settings
        self.watch: Watch = Nobody()
        # One thread: a megabyte of text takes 100 MB to read, which a thread keeps. With eight of
        # them and such bodies the server went up by 720 MB, and stayed there.
        self._reader = ThreadPoolExecutor(1, "paceline-reader")
        # Short chats do not wait for long bodies.
        self._short_reader = ThreadPoolExecutor(1, "paceline-short-reader")
        self.files = files
        self.defaults = replace(scheduler.model.defaults, fallback=_FALLBACK)
        self.tokenizer = files.tokenizer()
        self.words = Words(self.tokenizer)
        self.name = settings.name or served_name(files.name)
        self.created = self.now()
        self.fingerprint = f"fp_{files.fingerprint[:12]}"
        self.grammars = Grammars(
            files.folder / TOKENIZER,
            vocab_size=scheduler.model.engine.vocab_size,
            stop_token_ids=files.stop_token_ids,
        )

    @staticmethod
    def now() -> int:
        """What a response says when it was created: seconds since 1970."""
        return int(time.time())

    @property
    def context(self) -> int:
        """The most tokens that prompt and answer can have together."""
        return self.scheduler.admission.most

    async def apart(self, work: Callable[..., _T], *args: Any, short: bool = False) -> _T:
        """Run in a worker thread, off the event loop; one at a time, and one that is `short`."""
        reader = self._short_reader if short else self._reader
        return await asyncio.get_running_loop().run_in_executor(reader, work, *args)

    def check_model(self, name: str | None) -> None:
        """Raise Refused when a request is for another model. Without a name it is for this one."""
        if name is not None and name not in (self.name, *self.settings.aliases):
            raise unknown_model(name, self.name)

    def prompt(self, prompt: str | list[int]) -> list[int]:
        """A prompt's token ids; text is taken as it is.

        Raises:
            InvalidRequest: it is empty.
            Refused: it is too long.
        """
        least = self._least(prompt) if isinstance(prompt, str) else len(prompt)
        if least > self.context:  # whatever its tokens are: making them would take its time
            raise too_long(least, self.context, at_least=isinstance(prompt, str))
        tokens = self.scheduler.model.tokens(prompt, raw=True)
        known = self.scheduler.model.engine.vocab_size
        if not all(0 <= token < known for token in tokens):
            raise Refused(f"prompt: has token ids outside 0 to {known - 1}", param="prompt")
        if len(tokens) >= self.context:
            raise too_long(len(tokens), self.context)
        return tokens

    def _least(self, text: str) -> int:
        """How many tokens a text has at least, without making more than some of them."""
        glance = _GLANCE * self.context
        if len(text) > 2 * glance:
            # The cut may be in a word; what is behind it joins few tokens before it, never half.
            found = len(self.tokenizer.encode(text[:glance], special=True)) // 2
            if found > self.context:
                return found
        return self.words.least(text)

    def rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        answer: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """The text of a chat, and the form of its answer's thoughts.

        With `answer` the text ends where the answer begins.

        Raises:
            InvalidRequest: the template refuses the messages.
            Refused: there is no template, or it fails.
        """
        variables = dict(extra or {})
        try:
            if answer:
                return rendered(self.files, messages, variables, tools)
            text = self.files.template().render(
                messages, tools=tools, add_generation_prompt=False, **variables
            )
            return Rendered(text, None)
        except ModelError as error:
            reason = str(error).partition(";")[0]
            raise Refused(f"{reason}; use /v1/completions", param="messages") from error

    @property
    def knows_tools(self) -> bool:
        """Whether the chat template says what tools there are."""
        return "tools" in (self.files.chat_template or "")

    def asks(self, body: Common, tokens: list[int], **options: Any) -> list[Ask]:
        """The answers that a request wants to one prompt.

        `options` are those of `Options` that the body does not say in the same words; `form`, what
        makes the constraint of an answer; and `thoughts`, how its thoughts are told apart.

        Raises:
            InvalidRequest: a value is out of range.
            Refused: something is wanted that this server does not do.
        """
        form = options.pop("form", None) or self.form(body)
        thoughts: Thoughts | None = options.pop("thoughts", None)
        chosen: dict[str, Any] = {**self._sampling(body), **self._drafting(body), **options}
        if body.most is not None:
            chosen["max_tokens"] = max(body.most, 1)
        seed = None if body.seed in (None, -1) else body.seed
        found = []
        for index in range(body.n):
            constraint = form()
            if constraint is not None and body.ignore_eos:
                raise Refused(
                    "ignore_eos: an answer of a given form ends where the form does",
                    param="ignore_eos",
                )
            asked: Options = {**chosen, "constraint": constraint}  # type: ignore[typeddict-item]
            asked["seed"] = None if seed is None else (seed + index) % 2**64
            request = replace(check(asked, self.defaults), thoughts=thoughts)
            silent = body.most == 0
            found.append(Ask(tokens, request, body.cache_salt, body.cache_prompt, silent, index))
        return found

    def form(self, body: Common) -> Callable[[], Constraint | None]:
        """What makes the constraint of each answer of a request."""
        wanted, other = body.response_format, body.structured_outputs
        if wanted is not None and wanted.type == "json_object":
            return self.grammars.json_object
        if wanted is not None and wanted.type == "json_schema":
            if wanted.json_schema is None:
                raise Refused(
                    "response_format.json_schema: is missing", param="response_format.json_schema"
                )
            schema = wanted.json_schema.wanted
            return lambda: self.grammars.json_schema(schema)
        return (lambda: None) if other is None else self._structured(other)

    def _structured(self, wanted: StructuredOutputs) -> Callable[[], Constraint]:
        if wanted.schema_ is not None:
            return lambda: self.grammars.json_schema(wanted.schema_ or {})
        if wanted.regex is not None:
            return lambda: self.grammars.regex(wanted.regex or "")
        if wanted.choice is not None:
            choices = " | ".join(literal(each) for each in wanted.choice)
            return lambda: self.grammars.lark(f"start: {choices}")
        if wanted.grammar is not None:
            return lambda: self.grammars.lark(wanted.grammar or "")
        raise Refused(
            "structured_outputs has none of json, regex, choice and grammar",
            param="structured_outputs",
        )

    def calls(
        self, tools: list[Tool], choice: str | NamedTool, *, parallel: bool
    ) -> Callable[[], Constraint]:
        """What makes the constraint of answers that may call functions."""
        functions = [tool.function.model_dump(exclude_none=True) for tool in tools]
        named = choice.function.name if isinstance(choice, NamedTool) else choice
        return lambda: self.grammars.tools(functions, named, parallel=parallel)

    def predicted(self, prediction: Prediction | None) -> dict[str, Any]:
        """The option for what the client expects."""
        if prediction is None:
            return {}
        least = self.words.least(prediction.content)
        if least > self.context:
            raise Refused(
                f"prediction.content: has at least {least} tokens, and an answer at most "
                f"{self.context}",
                param="prediction.content",
            )
        return {"prediction": self.tokenizer.encode(prediction.content)}

    def _sampling(self, body: Common) -> dict[str, Any]:
        given = {
            "top_p": body.top_p,
            "top_k": body.top_k,
            "min_p": body.min_p,
            "presence_penalty": body.presence_penalty,
            "frequency_penalty": body.frequency_penalty,
            "repetition_penalty": body.repetition_penalty,
            "temperature": body.temperature,
        }
        chosen: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        if chosen.get("top_k") == -1:
            chosen["top_k"] = 0
        if chosen.get("top_p") == 0:
            chosen["top_p"] = _NUCLEUS_OF_ONE
        if body.repetition_detection is not None:
            chosen["repetition_detection"] = body.repetition_detection.model_dump()
        return {
            **chosen,
            "logit_bias": body.logit_bias,
            "stop": body.stop,
            "min_tokens": body.min_tokens,
            "ignore_eos": body.ignore_eos,
        }

    def _drafting(self, body: Common) -> dict[str, Any]:
        wanted, settings = body.speculation, self.settings
        block = settings.max_block if wanted.max_block is None else wanted.max_block
        return {
            "drafter": self._drafter(wanted.drafter),
            "policy": wanted.policy or settings.policy,
            "max_block": block,
        }

    def _drafter(self, wanted: str | None) -> str:
        own = self.settings.drafter
        if wanted in (None, own):
            return own
        if wanted in ("none", "auto"):
            return wanted
        for part in wanted.split("+"):
            if part not in _FREE and part.partition(":")[0] != "ngram":
                raise Refused(
                    f"drafter {part[:40]!r} cannot be asked for here; expected none, auto, what "
                    f"the server was started with, or ngram, {', '.join(_FREE)} joined by +",
                    param="speculation.drafter",
                )
        return wanted


def served_name(name: str) -> str:
    """What a model is called that was loaded as `name`: of a path nothing but its last part."""
    return Path(name).name.removesuffix(".gguf") if Path(name).exists() else name
