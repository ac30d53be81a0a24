"""POST /v1/decisions: typed questions about one input, answered with probabilities.

The questions of a request share the KV of its input. They run while other requests are answered, as
the prefill of one long prompt does.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field, model_validator

from paceline.errors import InvalidRequest, ModelError
from paceline.runtime.batching.request import BatchRequest
from paceline.runtime.decisions import MAX_QUESTIONS, Decisions
from paceline.server.api.endpoint import Endpoint, result_of
from paceline.server.api.response_body import InputItems
from paceline.server.api.response_items import conversation
from paceline.server.body import refuse_fields_of_others
from paceline.server.errors import ApiError
from paceline.server.http import Reply
from paceline.server.json_body import Body, parse
from paceline.server.remembered import Reader
from paceline.server.service import Lane, Service

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


def decision_request(service: Service, text: bytes) -> BatchRequest:
    """Return the request for a body. Raises ApiError if it cannot be served."""
    body = parse(DecisionsBody, text)
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
    return replace(request, salt=body.prompt_cache_key, timeout=service.settings.request_seconds)


def decisions(service: Service) -> Endpoint:
    async def work(text: bytes, reply: Reply) -> None:
        # Many questions in a short body take long to render: other short bodies must not wait.
        request = await service.readers.run(Lane.LONG, decision_request, service, text)
        result = await result_of(service, request)
        assert isinstance(result, Decisions)
        service.metrics.on_decisions(result)
        await reply.json({**result.as_dict(), "model": service.name})

    return Endpoint(service, work)
