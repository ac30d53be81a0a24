"""Bodies of requests: how JSON is parsed, and the fields that the endpoints share.

Independent of tokens and of the served model. Invariants: an unknown field is ignored, `null` means
absent, and the error for a wrong value names its field.

`paceline.options` has the ranges of sampling options.
"""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError, from_json

from paceline.options import RANGES
from paceline.server.api.errors import ApiError

MAX_ANSWERS = 8
"""The largest `n`."""

MAX_MESSAGES = 10_000
"""The most messages of a chat: parsing them takes a quarter of a second."""


class Body(BaseModel):
    """A JSON object of a request."""

    model_config = ConfigDict(strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            return {name: value for name, value in data.items() if value is not None}
        return data


def tag_by_type(tags: Mapping[str, str], missing: str = "") -> Callable[[Any], str | None]:
    """For a Discriminator: an object's field `type` -> the tag of its class.

    `missing` is the type of an object without one. Objects that were parsed already have the name
    of their class.
    """

    def tag(value: Any) -> str | None:
        if not isinstance(value, dict):
            return type(value).__name__ if isinstance(value, Body) else None
        kind = value.get("type") or missing
        return tags.get(kind) if isinstance(kind, str) else None

    return tag


def invalid(message: str) -> PydanticCustomError:
    """The error for a validator to raise; its message follows the field's name."""
    return PydanticCustomError("invalid", message)


def _joined(value: Any) -> Any:
    """Join text parts with newlines, as llama.cpp and vLLM do."""
    if not isinstance(value, list):
        return value
    found = []
    for place, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text"):
            raise invalid(
                f"part {place} is not of type text; images, audio and files are not supported"
            )
        if not isinstance(text, str):
            raise invalid(f"part {place} has no text")
        found.append(text)
    return "\n".join(found)


def _prompts(value: Any) -> Any:
    ids = isinstance(value, list) and value and all(type(each) is int for each in value)
    return [value] if isinstance(value, str) or ids else value


Prompts = Annotated[
    list[str | list[int]],
    BeforeValidator(_prompts, json_schema_input_type=str | list[int] | list[str] | list[list[int]]),
]
"""One or several prompts, each a text or token ids."""


def _several(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _biases(value: Any) -> Any:
    """Convert the keys, which are strings in JSON, to token ids."""
    if not isinstance(value, Mapping):
        return value
    try:
        return {int(token): bias for token, bias in value.items()}
    except ValueError:
        raise invalid("the keys should be token ids") from None


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text", "input_text", "output_text"]
    text: str


Text = Annotated[str, BeforeValidator(_joined, json_schema_input_type=str | list[TextPart])]
"""A string, or a list of text parts."""

_LOGPROBS = RANGES["logprobs"]
Logprobs = Annotated[int, Field(ge=_LOGPROBS.least, le=_LOGPROBS.most)]
"""How many of the likeliest tokens are listed."""

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""OpenAI's reasoning efforts."""


class Function(Body):
    """A function that the model may call."""

    name: str = Field(min_length=1)
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """OpenAI's wrapper of a function."""

    type: Literal["function"]
    function: Function


class NamedTool(Body):
    """The one function that the answer must call."""

    class Name(Body):
        """Its name."""

        name: str

    type: Literal["function"]
    function: Name


class CalledFunction(Body):
    """A function call of an earlier answer."""

    name: str
    arguments: str = "{}"


class Called(Body):
    """OpenAI's wrapper of a function call."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Text | None = None
    reasoning_content: str | None = Field(
        default=None, validation_alias=AliasChoices("reasoning_content", "reasoning")
    )
    """The thoughts of an earlier answer."""
    name: str | None = None
    tool_calls: list[Called] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> "Message":
        if self.content is None and self.role != "assistant":
            raise invalid("has no content")
        return self


class Prediction(Body):
    """Text that the answer is expected to contain."""

    type: Literal["content"]
    content: Text


class StreamOptions(Body):
    """Fields of a stream besides the answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Speculation(Body):
    """How this answer is drafted, which changes no token; absent fields are as the server's."""

    drafter: str | None = None
    policy: str | None = None
    max_block: int | None = None
    pieces: bool = False
    """Send the answer's tokens with their text and drafter."""


class NamedSchema(Body):
    """OpenAI's wrapper of a JSON schema."""

    name: str | None = None
    wanted: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """The structure of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Body):
    """The structure of the answer, in vLLM's form."""

    schema_: dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1)
    grammar: str | None = None
    """In llguidance's dialect of Lark."""


class RepetitionDetection(Body):
    """vLLM's rule for a loop: the last tokens are one pattern, repeated."""

    max_pattern_size: int = 0
    """Tokens of the longest pattern; 0 disables the rule."""
    min_pattern_size: int = 0
    min_count: int = 0
    """Repetitions of the pattern, 2 or more."""


_STRUCTURE = "use response_format or structured_outputs"
_UNSUPPORTED: Mapping[str, str] = {
    **dict.fromkeys(("grammar", "json_schema", "guided_json", "guided_regex"), _STRUCTURE),
    **dict.fromkeys(("guided_choice", "guided_grammar"), _STRUCTURE),
    "stop_token_ids": "use stop",
    "prompt_logprobs": "use echo and logprobs of /v1/completions",
    "use_beam_search": "there is no beam search",
    "continue_final_message": "use /v1/completions",
}
"""Fields of other servers that would change the answer, so they are rejected, not ignored."""


class GenerationBody(Body):
    """The fields that requests for an answer share.

    An absent sampling option is as the registry has it for the model, else as the model's own files
    have it, else OpenAI's default: a temperature of 1.
    """

    model: str | None = None
    n: int = Field(default=1, ge=1, le=MAX_ANSWERS)
    """Answers; the one at index i is sampled with seed + i."""
    stop: Annotated[
        list[str], BeforeValidator(_several, json_schema_input_type=str | list[str])
    ] = Field(default=[], max_length=16)
    seed: int | None = None
    """-1 draws one, as in llama.cpp."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """-1 disables it, as in vLLM."""
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = Field(
        default=None, validation_alias=AliasChoices("repetition_penalty", "repeat_penalty")
    )
    logit_bias: Annotated[
        dict[int, float], BeforeValidator(_biases, json_schema_input_type=dict[str, float])
    ] = {}
    min_tokens: int = 0
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    return_token_ids: bool = False
    cache_prompt: bool = True
    """Whether the prompt may use the prefix cache, and be added to it."""
    cache_salt: str = ""
    """Prompts share cached KV only under the same salt."""
    speculation: Speculation = Speculation()
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    repetition_detection: RepetitionDetection | None = None
    """Ends an answer that loops, with finish reason `repetition`."""

    @model_validator(mode="before")
    @classmethod
    def _supported(cls, data: Any) -> Any:
        for name, instead in _UNSUPPORTED.items():
            if isinstance(data, Mapping) and data.get(name):
                raise ApiError(f"{name} is not supported; {instead}", param=name)
        return data

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise ApiError("stream_options requires stream: true", param="stream_options")
        return self

    @property
    def usage_at_end(self) -> bool:
        """Whether the last chunk of a stream has the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_in_chunks(self) -> bool:
        """Whether every chunk of a stream has the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def max_answer_tokens(self) -> int | None:
        """Limit of the answer's tokens; None: the rest of the context."""
        return None


_Parsed = TypeVar("_Parsed", bound=Body)


def parse(kind: type[_Parsed], body: bytes) -> _Parsed:
    """The body of a request.

    Raises ApiError if it is not JSON, or has a wrong value; the message names the first one.
    """
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise ApiError(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError("the body should be a JSON object", code="invalid_json")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = _path(data, fault["loc"])
        what = "is missing" if fault["type"] == "missing" else fault["msg"]
        raise ApiError(f"{where}: {what}", param=where) from None


def _path(data: Any, steps: tuple[int | str, ...]) -> str:
    """`messages[0].content`, without pydantic's names of the union members that it tried."""
    found = ""
    for step in steps:
        if isinstance(step, int):
            found += f"[{step}]"
            data = data[step] if isinstance(data, list) and step < len(data) else None
        elif isinstance(data, dict) and (step in data or step.islower()):
            found += f".{step}" if found else step
            data = data.get(step)
    return found
