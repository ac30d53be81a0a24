"""Any OpenAI-compatible server as a peer: the client measures times, the server counts tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from paceline.errors import ModelError
from paceline_lab.bench.turns import PromptTurn
from paceline_lab.client import Access, closed_loop, connect
from paceline_lab.peers.base import PeerAnswer


class ServerPeer:
    """A server that answers questions; see `Peer`."""

    def __init__(self, url: str, access: Access) -> None:
        """Connect. Raises InvalidRequest if there is no OpenAI-compatible server at the URL."""
        self._endpoints = connect(url, access)
        self.modes: Sequence[str] = tuple(self._endpoints)
        fields = {mode: endpoint.fields for mode, endpoint in self._endpoints.items()}
        endpoint = self._endpoints[self.modes[-1]]
        self.name = endpoint.name
        self.settings: Mapping[str, Any] = {"model": endpoint.model, "fields": fields}

    def answer(self, question: PromptTurn, max_tokens: int, mode: str) -> PeerAnswer:
        """Answer a question. Raises ModelError for a server error or a missing token count."""
        endpoint = replace(self._endpoints[mode], max_tokens=max_tokens)
        prompt = (question.name, question.messages)
        sample = closed_loop(endpoint, [prompt], clients=1, requests=1)[0]
        if sample.error is not None:
            raise ModelError(sample.error.partition(": ")[2])
        if sample.tokens < 1:
            raise ModelError("the answer has no token count (usage)")
        first = sample.seconds if sample.first is None else sample.first
        return PeerAnswer(sample.text, None, sample.tokens, first, sample.seconds - first)
