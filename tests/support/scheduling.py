"""Requests that a test submits to a scheduler itself."""

import queue
from typing import Any

from paceline.decoding.types import Step
from paceline.runtime.batching.request import BatchRequest, Event
from paceline.runtime.batching.scheduler import Scheduler
from paceline.runtime.result import Result
from support.waiting import PATIENCE

_FIELDS = ("salt", "cached", "timeout")


class Submitted:
    """A submitted request and its events; `options` are those of `generate`."""

    def __init__(self, scheduler: Scheduler, prompt: str | list[int], **options: Any) -> None:
        fields = {name: options.pop(name) for name in _FIELDS if name in options}
        self.prompt, self.options = prompt, options
        self.text = ""
        self.streamed: list[int] = []
        self._events: queue.Queue[Event] = queue.Queue()
        tokens = scheduler.model.tokens(prompt, raw=True)
        request = scheduler.model._request(options, private=bool(fields.get("salt")))  # type: ignore[arg-type]
        request = BatchRequest(tokens, request, **fields)
        self.queued: BatchRequest = scheduler.submit(request, self._events.put)

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
