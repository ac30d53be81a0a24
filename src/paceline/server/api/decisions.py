"""POST /v1/decisions and /v1/systemone: typed questions, answered with probabilities.

The questions of a request share the KV of their input. They run while other requests are answered,
as the prefill of one long prompt does. System One is TypeSafe's format, translated to OpenAI's: a
`noul` is a choice between true and false, and its answer the probability of true.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import Field, model_validator

from paceline.errors import InvalidRequest, ModelError
from paceline.runtime.batching.request import BatchRequest
from paceline.runtime.decisions import MAX_QUESTIONS, Decision, Decisions
from paceline.server.api.endpoint import Endpoint, result_of
from paceline.server.api.response_body import InputItems
from paceline.server.api.response_items import conversation
from paceline.server.body import refuse_fields_of_others
from paceline.server.errors import ApiError
from paceline.server.http import Reply
from paceline.server.json_body import Body, parse, validate
from paceline.server.remembered import Reader
from paceline.server.service import Lane, Service

_B = TypeVar("_B")

_PATH = re.compile(r"(input|questions)[^\s:]*(?=:)")


class DecisionsBody(Body):
    """POST /v1/decisions."""

    model: str | None = None
    input: InputItems
    questions: list[dict[str, Any]] = Field(min_length=1, max_length=MAX_QUESTIONS)
    """Questions: a `predicate`, a `choice` with `choices`, or a `score` with `levels`."""
    prompt_cache_key: str = ""
    """Inputs share cached KV only under the same key."""

    @model_validator(mode="before")
    @classmethod
    def _readable(cls, data: Any) -> Any:
        """Replace parts and items that a text model cannot read; reject those without text."""
        refuse_fields_of_others(cls, data)
        if isinstance(data, Mapping) and isinstance(turns := data.get("input"), list):
            reader = Reader()
            data = {**data, "input": reader.turns(turns, "input")}
            for ignored in reader.ignored:
                raise ApiError(f"{ignored}: this model reads text", param=ignored.split(": ")[0])
        return data


def decision_request(service: Service, body: DecisionsBody) -> BatchRequest:
    """Return the request for a body. Raises ApiError if it cannot be served."""
    service.check_model(body.model)
    messages = conversation((), body.input, lambda _: None, lambda place: place.name)
    for message in messages:
        service.prompts.check_length(message.content or "")
    given = [message.model_dump(exclude_none=True) for message in messages]
    try:
        request = service.model._decision_request(
            given, body.questions, parse_special=service.settings.parse_special
        )
    except (InvalidRequest, ModelError) as error:
        path = _PATH.match(str(error))
        raise ApiError(str(error), param=path and path[0]) from error
    return replace(request, salt=body.prompt_cache_key, timeout=service.settings.timeout)


def decisions(service: Service) -> Endpoint:
    def read(text: bytes) -> tuple[None, BatchRequest]:
        return None, decision_request(service, parse(DecisionsBody, text))

    return _deciding(service, read, lambda _, result: result.as_dict())


def _deciding(
    service: Service,
    read: Callable[[bytes], tuple[_B, BatchRequest]],
    response: Callable[[_B, Decisions], dict[str, Any]],
) -> Endpoint:
    async def work(text: bytes, reply: Reply) -> None:
        # Many questions in a short body take long to render: other short bodies must not wait.
        body, request = await service.readers.run(Lane.LONG, read, text)
        result = await result_of(service, request)
        assert isinstance(result, Decisions)
        service.metrics.on_decisions(result)
        await reply.json({**response(body, result), "model": service.name})

    return Endpoint(service, work)


_TYPES = {"noul": "choice", "choice": "choice", "score": "score"}
_SYSTEM_ONE_PATH = re.compile(r"^questions\[(\d+)\](\.(choices|levels)[^\s:]*)?")


class SystemOneBody(Body):
    """POST /v1/systemone."""

    model: str | None = None
    state: str | dict[str, Any] | list[Any]
    """The input: text, or JSON that the model reads as text."""
    questions: dict[str, dict[str, Any]]
    """Name -> question: a `noul`, a `choice` or a `score`, with `instructions` and `criteria`."""


def _text(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else value


def _question(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return a question in OpenAI's format."""
    kind, criteria = given.get("type"), given.get("criteria")
    if not isinstance(kind, str) or kind not in _TYPES:
        raise ApiError(f"questions.{name}.type: expected noul, choice or score", param="questions")
    if unknown := given.keys() - {"type", "instructions", "criteria"}:
        raise ApiError(f"questions.{name}: unknown field {min(unknown)}", param="questions")
    question = {
        "type": _TYPES[kind],
        "name": name,
        "instructions": _text(given.get("instructions")),
    }
    if kind == "score":
        levels = [{"label": one} for one in criteria] if isinstance(criteria, list) else criteria
        return {**question, "levels": levels}
    about, expected = criteria or {}, "an object"
    if kind == "choice" and isinstance(criteria, list):
        expected = "unique texts"
        texts = dict.fromkeys(map(str, criteria))
        about = texts if [*texts] == criteria else None
    if kind == "noul" and isinstance(about, dict) and about.keys() - {"true", "false"}:
        about, expected = None, "true and false"
    if not isinstance(about, dict):
        raise ApiError(f"questions.{name}.criteria: expected {expected}", param="questions")
    if kind == "noul":
        about = {flag: about.get(str(flag).lower()) for flag in (True, False)}
    pairs = about.items()
    return {**question, "choices": [{"value": one, "description": text} for one, text in pairs]}


def _answer(kind: str, decision: Decision) -> dict[str, Any]:
    """Return a decision in TypeSafe's format."""
    parts = [*decision.probabilities]
    if kind == "noul":
        return {"type": kind, "noul": parts[0]}
    answer = {"type": kind, kind: getattr(decision, kind), "confidence": decision.confidence}
    options = [str(one) for one in decision.question.options]
    if kind == "choice":
        return {**answer, "probabilities": dict(zip(options, parts, strict=True))}
    levels = [str(level) for level in range(len(parts))]
    legend = dict(zip(levels, options, strict=True))
    return {**answer, "legend": legend, "probabilities": dict(zip(levels, parts, strict=True))}


def system_one(service: Service) -> Endpoint:
    def read(text: bytes) -> tuple[SystemOneBody, BatchRequest]:
        body = parse(SystemOneBody, text)
        questions = [_question(name, given) for name, given in body.questions.items()]
        sent = {"model": body.model, "input": _text(body.state), "questions": questions}
        try:
            return body, decision_request(service, validate(DecisionsBody, sent))
        except ApiError as error:
            _rename_fields(error, [*body.questions])
            raise

    def response(body: SystemOneBody, result: Decisions) -> dict[str, Any]:
        pairs = zip(body.questions.items(), result.answers, strict=True)
        answers = {name: _answer(one["type"], decision) for (name, one), decision in pairs}
        return {**result.as_dict(), "answers": answers}

    return _deciding(service, read, response)


def _rename_fields(error: ApiError, names: list[str]) -> None:
    """Replace the path of a field of decisions by that of System One, in an error."""

    def path(found: re.Match[str]) -> str:
        return f"questions.{names[int(found[1])]}{'.criteria' * bool(found[2])}"

    message = re.sub(r"^input\b", "state", _SYSTEM_ONE_PATH.sub(path, str(error)))
    if message != str(error):
        error.fields |= {"message": message, "param": message.partition(": ")[0]}
