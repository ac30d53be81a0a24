"""Requests that a test submits directly to a model's scheduler."""

import queue
from typing import Any

from paceline.decoding.types import Step
from paceline.runtime.batching.request import BatchRequest, Event
from paceline.runtime.model import Model
from paceline.runtime.result import Result
from support.waiting import PATIENCE

_FIELDS = ("salt", "cached", "timeout")


class Submitted:
    """A submitted request and its events; `options` are those of `generate`."""

    def __init__(self, model: Model, prompt: str | list[int], **options: Any) -> None:
        fields = {name: options.pop(name) for name in _FIELDS if name in options}
        self.prompt, self.options = prompt, options
        self.text = ""
        self.streamed: list[int] = []
        self._events: queue.Queue[Event] = queue.Queue()
        tokens = model.tokens(prompt, raw=True)
        request = model._request(options, private=bool(fields.get("salt")))  # type: ignore[arg-type]
        queued = BatchRequest(model, tokens, request, **fields)
        self.queued = model.scheduler.submit(queued, self._events.put)

    def result(self) -> Result:
        """The result, once the request has ended; raises its error if it failed."""
        while True:
            event = self._events.get(timeout=PATIENCE)
            match event:
                case Step():
                    self.text += event.text
                    self.streamed += event.tokens
                case Result():
                    return event
                case Exception():
                    raise event


def free_slots(model: Model) -> int:
    """Return the engine's free slots, plus those of the prefix cache."""

    def evict() -> int:
        while model.scheduler.prefix_cache.evict():
            pass
        return model.engine.free_slots

    return model.call(evict)


def end_scheduler(model: Model) -> None:
    """End a model's thread, and free what its prefix cache holds; the engine stays open."""
    if model._scheduler is not None:
        model._scheduler.cancel_all()
        model._scheduler.close()
