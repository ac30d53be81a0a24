"""What clients may send: how bodies are read, and what requests for an answer share.

Knows shapes and types. Knows nothing of tokens, or of what can be served. The rule: a field that is
not known is let be, `null` is as good as nothing, and a wrong value names its field.

Numbers have the ranges that `paceline.runtime.options` gives them; they are checked there.
"""

from collections.abc import Mapping
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

from paceline.server.api.errors import Refused

MOST_ANSWERS = 8
"""The largest `n`."""


class Body(BaseModel):
    """A JSON object of a request."""

    model_config = ConfigDict(strict=True, extra="ignore")

    @model_validator(mode="before")
    @classmethod
    def _null_is_nothing(cls, data: Any) -> Any:
        if isinstance(data, Mapping):
            return {name: value for name, value in data.items() if value is not None}
        return data


def wrong(message: str) -> PydanticCustomError:
    """What a validator raises; the message follows the field's name."""
    return PydanticCustomError("wrong", message)


def _joined(value: Any) -> Any:
    """Parts of a text, on lines of their own, as llama.cpp and vLLM join them."""
    if not isinstance(value, list):
        return value
    found = []
    for place, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("text") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text"):
            raise wrong(f"part {place} is not of type text, and this model reads nothing else")
        if not isinstance(text, str):
            raise wrong(f"part {place} has no text")
        found.append(text)
    return "\n".join(found)


def _several(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _biases(value: Any) -> Any:
    """Token ids are keys of a JSON object, which are strings."""
    if not isinstance(value, Mapping):
        return value
    try:
        return {int(token): bias for token, bias in value.items()}
    except ValueError:
        raise wrong("the keys should be token ids") from None


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text", "input_text", "output_text"]
    text: str


Text = Annotated[str, BeforeValidator(_joined, json_schema_input_type=str | list[TextPart])]
"""A string, or a list of text parts."""


class StreamOptions(Body):
    """What a stream carries besides the answer."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Speculation(Body):
    """How this answer is drafted; it changes no token. What is left out is as the server has it."""

    drafter: str | None = None
    policy: str | None = None
    max_block: int | None = None
    pieces: bool = False
    """Say of each piece of text whether it was drafted."""


class NamedSchema(Body):
    """OpenAI's wrapping of a JSON schema."""

    name: str | None = None
    wanted: dict[str, Any] = Field(alias="schema")


class ResponseFormat(Body):
    """What an answer has to look like."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Body):
    """The same as vLLM asks for it."""

    schema_: dict[str, Any] | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1)
    grammar: str | None = None
    """In llguidance's kind of Lark."""


class RepetitionDetection(Body):
    """What counts as a loop, as vLLM has it: the last tokens are one pattern, again and again."""

    max_pattern_size: int = 0
    """Tokens of the longest pattern; 0 is off."""
    min_pattern_size: int = 0
    min_count: int = 0
    """How often it comes, 2 or more."""


_FORMS = "use response_format or structured_outputs"
_NOT_DONE: Mapping[str, str] = {
    **dict.fromkeys(("grammar", "json_schema", "guided_json", "guided_regex"), _FORMS),
    **dict.fromkeys(("guided_choice", "guided_grammar"), _FORMS),
    "stop_token_ids": "use stop",
    "prompt_logprobs": "use echo and logprobs of /v1/completions",
    "use_beam_search": "there is no beam search here",
    "continue_final_message": "use /v1/completions",
}
"""What other servers do and this one does not: not doing it in silence would be worse."""


class Common(Body):
    """What requests for an answer share.

    A sampling setting that is not said is as the registry has it for the model, else as the model's
    own files say, else as with OpenAI: a temperature of 1.
    """

    model: str | None = None
    n: int = Field(default=1, ge=1, le=MOST_ANSWERS)
    """Answers; the one at index i is sampled with seed + i."""
    stop: Annotated[
        list[str], BeforeValidator(_several, json_schema_input_type=str | list[str])
    ] = Field(default=[], max_length=16)
    seed: int | None = None
    """-1 draws one, as in llama.cpp."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """-1 is off, as in vLLM."""
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
    """Whether the prompt may be found in the cache, and left there."""
    cache_salt: str = ""
    """Prompts under different salts share nothing."""
    speculation: Speculation = Speculation()
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    repetition_detection: RepetitionDetection | None = None
    """Ends an answer that goes round in circles, with finish reason `repetition`."""

    @model_validator(mode="before")
    @classmethod
    def _does_it(cls, data: Any) -> Any:
        for name, instead in _NOT_DONE.items():
            if isinstance(data, Mapping) and data.get(name):
                raise Refused(f"{name} is not done here; {instead}", param=name)
        return data

    @model_validator(mode="after")
    def _streamed(self) -> "Common":
        if self.stream_options is not None and not self.stream:
            raise Refused("stream_options is for stream: true", param="stream_options")
        return self

    @property
    def usage_wanted(self) -> bool:
        """Whether a stream ends with a chunk that says what was used."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def usage_always(self) -> bool:
        """Whether every chunk says so."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    @property
    def most(self) -> int | None:
        """Tokens in the answer; None: to the end of the context."""
        return None


Read = TypeVar("Read", bound=Body)


def read(kind: type[Read], body: bytes) -> Read:
    """The body of a request.

    Raises:
        Refused: it is no JSON, or not what is expected; the first fault is named.
    """
    try:
        data = from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise Refused(f"the body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(data, dict):
        raise Refused("the body should be a JSON object", code="invalid_json")
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        fault = error.errors(include_url=False, include_input=False, include_context=False)[0]
        where = _path(data, fault["loc"])
        what = "is missing" if fault["type"] == "missing" else fault["msg"]
        raise Refused(f"{where}: {what}", param=where) from None


def _path(data: Any, steps: tuple[int | str, ...]) -> str:
    """`messages[0].content`. What pydantic calls the kinds that it tried is left out."""
    found = ""
    for step in steps:
        if isinstance(step, int):
            found += f"[{step}]"
            data = data[step] if isinstance(data, list) and step < len(data) else None
        elif isinstance(data, dict) and (step in data or step.islower()):
            found += f".{step}" if found else step
            data = data.get(step)
    return found
