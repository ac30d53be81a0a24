"""POST /v1/systemone: TypeSafe's format of typed questions, translated to OpenAI's decisions.

A `noul` is a choice between true and false, and its answer the probability of true.
"""

import json
import re
from typing import Any

from paceline.runtime.decisions import Decision, Decisions
from paceline.server.api.decisions import decision_request
from paceline.server.api.endpoint import Endpoint, result_of
from paceline.server.errors import ApiError
from paceline.server.http import Reply
from paceline.server.json_body import Body, parse
from paceline.server.service import Lane, Service

_TYPES = {"noul": "choice", "choice": "choice", "score": "score"}
_PATH = re.compile(r"^questions\[(\d+)\](\.(choices|levels)(\[\d+\](\.(value|label))?)?)?")


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
    def read(text: bytes) -> tuple[SystemOneBody, Any]:
        body = parse(SystemOneBody, text)
        questions = [_question(name, given) for name, given in body.questions.items()]
        sent = {"model": body.model, "input": _text(body.state), "questions": questions}
        try:
            return body, decision_request(service, json.dumps(sent).encode())
        except ApiError as error:
            _rename_fields(error, [*body.questions])
            raise

    async def work(text: bytes, reply: Reply) -> None:
        body, request = await service.readers.run(Lane.LONG, read, text)
        result = await result_of(service, request)
        assert isinstance(result, Decisions)
        service.metrics.on_decisions(result)
        pairs = zip(body.questions.items(), result.answers, strict=True)
        answers = {name: _answer(one["type"], decision) for (name, one), decision in pairs}
        await reply.json({**result.as_dict(), "answers": answers, "model": service.name})

    return Endpoint(service, work)


def _rename_fields(error: ApiError, names: list[str]) -> None:
    """Replace the path of a field of decisions by that of System One, in an error."""

    def path(found: re.Match[str]) -> str:
        return f"questions.{names[int(found[1])]}{'.criteria' * bool(found[2])}"

    message = re.sub(r"^input\b", "state", _PATH.sub(path, str(error)))
    if message != str(error):
        error.fields |= {"message": message, "param": message.partition(": ")[0]}
