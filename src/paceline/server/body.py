"""The bodies that the service prepares: chats, completions, and texts to embed.

Bodies of other APIs become a chat's (`api/messages_body.py`, `api/response_body.py`). Independent
of tokens and of the served model. `paceline.options` has the ranges of sampling options.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from paceline.options import OPTIONS, RANGES
from paceline.server.errors import ApiError, field_error
from paceline.server.json_body import (
    AllowedTools,
    Body,
    FunctionCall,
    NamedTool,
    Prompts,
    Text,
    Tool,
    invalid,
    or_text,
)
from paceline.server.remembered import Reader

MAX_ANSWERS = 8
"""The maximum of `n`."""

MAX_MESSAGES = 10_000
"""Maximum messages of a chat: parsing this many takes a quarter of a second."""

_MAX_PROMPTS = 128

_MAX_TEXTS = 2048
"""OpenAI's limit of texts per embedding request."""

_TINY_TOP_P = 1e-9
"""Replaces a top_p of 0, which OpenAI clients use for the most likely token."""

_DEFAULT_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions."""


def _biases(value: Any) -> Any:
    """Convert the keys, which are strings in JSON, to token ids."""
    if not isinstance(value, Mapping):
        return value
    try:
        biases = {int(token): bias for token, bias in value.items()}
    except ValueError:
        biases = {}
    if [*map(str, biases)] != [*value]:  # Python also reads "1_0" and " 10"
        raise invalid("the keys should be token ids")
    return biases


def _as_ours(other: float, ours: float | None) -> AfterValidator:
    """Replace another server's value with our equivalent."""
    return AfterValidator(lambda value: ours if value == other else value)


_LOGPROBS = RANGES["logprobs"]
Logprobs = Annotated[int, Field(ge=_LOGPROBS.min_value, le=_LOGPROBS.max_value)]
"""Number of most likely tokens in the list."""


def _one(count: int) -> int:
    if count != 1:
        raise invalid(f"is {count}; expected 1, as this endpoint returns one answer")
    return count


OneAnswer = Annotated[int, AfterValidator(_one)]

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""OpenAI's reasoning efforts."""


class Message(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    reasoning_content: str | None = Field(
        default=None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )
    """The reasoning of an earlier answer."""
    refusal: str | None = None
    """An earlier answer's refusal in place of content."""
    name: str | None = None
    tool_calls: list[FunctionCall] | None = None
    tool_call_id: str | None = None
    place: SkipJsonSchema[str] = Field(default="", exclude=True)
    """Its path in the body of another API, for errors."""

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        self.content = self.refusal if self.content is None else self.content
        if self.content is None and self.role != "assistant":
            raise invalid("has no content")
        return self


class Prediction(Body):
    """Text that the answer is expected to contain."""

    type: Literal["content"]
    content: Text


class StreamOptions(Body):
    """Adds the usage to the last chunk of a stream, or to every chunk the usage so far."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Speculation(Body, extra="forbid"):
    """Speculation settings, which change no token; missing fields have the server's values."""

    drafter: str | None = None
    policy: str | None = None
    max_block: int | None = None
    pieces: bool = False
    """Send the answer's tokens with their text and drafter."""


class NamedSchema(Body):
    """OpenAI's wrapper of a JSON schema."""

    name: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """The structure of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    """The schema in llama.cpp's format."""

    @model_validator(mode="after")
    def _has_schema(self) -> "ResponseFormat":
        if self.json_schema is None and self.schema_ is not None:
            self.json_schema = NamedSchema(schema=self.schema_)
        if self.json_schema is not None and self.type == "text":
            raise invalid("has a schema, which type text does not follow; use json_schema")
        if self.json_schema is None and self.type == "json_schema":
            raise invalid("has no json_schema")
        return self


class StructuredOutputs(Body):
    """The structure of the answer, in vLLM's form."""

    schema_: dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1)
    grammar: str | None = None
    """A grammar in llguidance's Lark dialect."""

    @model_validator(mode="after")
    def _has_one(self) -> "StructuredOutputs":
        if (self.schema_, self.regex, self.choice, self.grammar).count(None) != 3:
            raise invalid("should have one of json, regex, choice and grammar")
        return self


class RepetitionDetection(Body, extra="forbid"):
    """vLLM's rule for a loop: the last tokens are one pattern, repeated."""

    max_pattern_size: int = 0
    """Tokens of the longest pattern; 0 disables the rule."""
    min_pattern_size: int = 0
    min_count: int = 0
    """Repetitions of the pattern, 2 or more."""
    min_tokens: int = 0
    """Tokens of all repetitions together; not in vLLM."""


_STRUCTURE = "use response_format or structured_outputs"
_SWITCHES = ("think", "enable_thinking")  # false also has an effect
_UNSUPPORTED: Mapping[str, str] = {
    **dict.fromkeys(("grammar", "json_schema", "guided_json", "guided_regex"), _STRUCTURE),
    **dict.fromkeys(("guided_choice", "guided_grammar"), _STRUCTURE),
    **dict.fromkeys(("bad_words", "allowed_token_ids"), "use logit_bias"),
    **dict.fromkeys(("n_predict", "num_predict"), "use max_tokens"),
    **dict.fromkeys(
        ("mirostat", "dry_multiplier", "xtc_probability"), "this sampling method is not supported"
    ),
    **dict.fromkeys(("options", "extra_body"), "send its contents as fields of the body"),
    **dict.fromkeys(_SWITCHES, "use reasoning_effort or thinking"),
    "stop_token_ids": "use stop",
    "prompt_logprobs": "use echo and logprobs of /v1/completions",
    "use_beam_search": "beam search is not supported",
    "truncate_prompt_tokens": "shorten the prompt",
    "chat_template": "the model's own is used",
}
"""Fields of other servers that would change the answer, so they are rejected, not ignored."""

_SYNONYMS = (
    ("max_tokens", "max_completion_tokens", "max_output_tokens"),
    ("stop", "stop_sequences"),
    ("messages", "input", "prompt"),
    ("messages", "system", "instructions"),
    ("reasoning_effort", "reasoning", "thinking"),
    ("response_format", "text", "output_config", "output_format"),
    ("top_logprobs", "logprobs"),
    ("tools", "functions"),
)
"""Fields that have the same meaning at different endpoints, or in older clients."""

_HARMLESS = ("metadata", "store")
"""Fields of some endpoints that do not change answers, and that clients also send elsewhere."""


class GenerationBody(Body):
    """The fields shared by all requests for an answer.

    The default of a sampling option comes from the registry's entry for the model, then from the
    model's own files, then from OpenAI, where the temperature is 1.
    """

    model: str | None = None
    n: int = Field(default=1, ge=1, le=MAX_ANSWERS)
    """Number of answers; the one at index i is sampled with seed + i."""
    stop: Annotated[list[str], or_text(list[str], str)] = Field(default=[], max_length=16)
    seed: Annotated[int | None, _as_ours(-1, None)] = None
    """-1 draws a seed, as in llama.cpp."""
    temperature: float | None = None
    top_p: Annotated[float | None, _as_ours(0, _TINY_TOP_P)] = None
    top_k: Annotated[int | None, _as_ours(-1, 0)] = None
    """-1 disables it, as in vLLM."""
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = Field(
        default=None, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    logit_bias: Annotated[
        dict[int, float], BeforeValidator(_biases, json_schema_input_type=dict[str, float])
    ] = Field(default={})
    min_tokens: int = 0
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    cache_prompt: bool = True
    """True if the prompt may use the prefix cache, and be added to it."""
    cache_salt: str = ""
    """Prompts share cached KV only under the same salt."""
    speculation: Speculation = Speculation()
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    repetition_detection: RepetitionDetection | None = None
    """Ends an answer that loops, with finish reason `repetition`."""

    blocks: ClassVar[bool] = False
    """True if the parts of messages are Anthropic's content blocks."""
    _ignored_items: list[str] = PrivateAttr(default_factory=list)

    @model_validator(mode="wrap")
    @classmethod
    def _readable(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Refuse fields that would be ignored; replace parts that a text model cannot read."""
        for field, instead in _UNSUPPORTED.items() if isinstance(data, Mapping) else ():
            if (value := data.get(field)) or (value is False and field in _SWITCHES):
                raise ApiError(f"{field} is not supported; {instead}", param=field)
        refuse_fields_of_others(cls, data)
        reader = Reader(blocks=cls.blocks)
        name = "input" if "input" in cls.model_fields else "messages"
        if isinstance(data, Mapping) and isinstance(turns := data.get(name), list):
            data = {**data, name: reader.turns(turns, name)}
            if reader.tools and isinstance(tools := data.get("tools") or [], list):
                data["tools"] = tools + reader.tools
        body = handler(data)
        body._ignored_items = reader.ignored
        return body

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> "GenerationBody":
        if "stream_options" in self.model_fields_set and not self.stream:
            raise ApiError("stream_options requires stream: true", param="stream_options")
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The fields that are options of `paceline.options`, which checks their values."""
        return self.model_dump(include={*OPTIONS}, exclude_none=True)

    @property
    def form(self) -> ResponseFormat | None:
        """The structure of the answer in OpenAI's format; None without one."""
        form = self.response_format
        return None if form is None or form.type == "text" else form

    @property
    def structured(self) -> bool:
        """True if the answer has a structure."""
        return self.structured_outputs is not None or self.form is not None

    @property
    def ignored_tools(self) -> list[str]:
        """Types and names of the ignored tools."""
        return []

    @property
    def ignored_items(self) -> list[str]:
        """Paths and types of the parts and items that became markers."""
        return self._ignored_items

    def as_chat(self, **more: Any) -> "ChatBody":
        """Return a chat's body with these fields and `more`, which are not checked again."""
        shared = {name: getattr(self, name) for name in GenerationBody.model_fields}
        return ChatBody.model_construct(**shared, **more)


def refuse_fields_of_others(kind: type[Body], data: Any) -> None:
    """Reject fields of other endpoints: ignoring them would change the answer."""
    for name, value in data.items() if isinstance(data, Mapping) else ():
        others = [other.model_fields for other in GenerationBody.__subclasses__()]
        defaults = [fields[name].get_default() for fields in others if name in fields]
        same = {own for names in _SYNONYMS if name in names for own in names}
        if not value or value in defaults or not (defaults or same):
            continue
        if name not in kind.model_fields and name not in _HARMLESS:
            instead = next((f"use {own}" for own in kind.model_fields if own in same), "")
            raise ApiError(
                f"{name} is not a field of this endpoint; {instead or 'remove it'}", param=name
            )


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(default=None, ge=-1)
    """-1 means no limit, as in llama.cpp; 0 computes only the prompt."""
    max_completion_tokens: int | None = Field(default=None, ge=-1)
    logprobs: bool = False
    top_logprobs: Logprobs | None = None
    tools: list[Tool] = Field(default=[])
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools = "auto"
    parallel_tool_calls: bool = True
    prediction: Prediction | None = None
    chat_template_kwargs: dict[str, Any] = Field(default={})
    reasoning_effort: Effort | None = None
    """`none` turns reasoning off."""
    continue_final_message: bool | None = None
    """vLLM's field: continue the assistant's last message; by default, if it has text."""
    add_generation_prompt: bool | None = None
    """vLLM's field, the opposite of `continue_final_message`."""
    include_reasoning: bool = True
    """True to send reasoning, as in vLLM."""
    modalities: list[str] = Field(default=["text"])

    @model_validator(mode="after")
    def _consistent(self) -> "ChatBody":
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        if self.top_logprobs is not None and not self.logprobs:
            raise ApiError("top_logprobs requires logprobs: true", param="top_logprobs")
        if None is not self.add_generation_prompt == self.continue_final_message:
            name = "add_generation_prompt"
            raise ApiError(f"{name} contradicts continue_final_message; send one", param=name)
        if self.modalities != ["text"]:
            raise ApiError("the model's output is text alone", param="modalities")
        if isinstance(self.tool_choice, AllowedTools):
            allowed = self.tool_choice.allowed_tools
            names = {tool.function.name for tool in allowed.tools}
            if unknown := names - {tool.function.name for tool in self.tools}:
                raise ApiError(
                    f"{min(unknown)[:80]!r} is not a function in tools", param="tool_choice"
                )
            self.tools = [tool for tool in self.tools if tool.function.name in names]
            self.tool_choice = allowed.mode
        return self

    @property
    def continues(self) -> bool | None:
        """True to continue the last message, False to close it, None to decide by its text."""
        opens = self.add_generation_prompt
        return self.continue_final_message if opens is None else not opens

    @property
    def calling(self) -> bool:
        """True if the answer may call functions."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def forced(self) -> bool:
        """True if the answer consists of calls."""
        return self.calling and self.tool_choice != "auto"


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    prompt: Prompts = Field(min_length=1, max_length=_MAX_PROMPTS)
    max_tokens: int = Field(default=_DEFAULT_TOKENS, ge=-1)
    echo: bool = False
    logprobs: Logprobs | None = None
    suffix: str = ""
    """The text after the answer, for fill-in-the-middle models."""
    continued_tokens: int = Field(default=0, ge=0)
    """Number of tokens at the end of a token id prompt that are a chat answer so far. The answer is
    continued, and its reasoning is sent separately, as in a chat."""
    best_of: int | None = None
    prediction: Prediction | None = None

    @model_validator(mode="after")
    def _consistent(self) -> "CompletionBody":
        if self.suffix and self.echo:
            raise ApiError("a prompt with a suffix cannot be echoed", param="echo")
        count = self.continued_tokens
        short = any(isinstance(prompt, str) or len(prompt) <= count for prompt in self.prompt)
        if count and (self.suffix or short):
            raise field_error(
                "continued_tokens", "expected a prompt of more token ids than these, and no suffix"
            )
        if self.best_of not in (None, self.n):
            raise ApiError("best_of must equal n", param="best_of")
        if self.stream and self.echo and self.logprobs is not None:
            raise ApiError(
                "a stream cannot echo the prompt with logprobs, which are complete at its end",
                param="echo",
            )
        return self


class EmbeddingsBody(Body):
    """POST /v1/embeddings."""

    model: str | None = None
    input: Prompts = Field(min_length=1, max_length=_MAX_TEXTS)
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)
    """Leading numbers of a vector to keep, for models that support shorter embeddings."""
