"""POST /v1/embeddings: a unit vector for each text, from an embedding model.

Texts are pooled concurrently with other requests, a few at a time: each holds KV until it ends.
"""

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from paceline.runtime.batching.request import BatchRequest
from paceline.runtime.embedding import Embedding, normalized
from paceline.server.api.endpoint import Endpoint, result_of
from paceline.server.body import EmbeddingsBody
from paceline.server.errors import field_error
from paceline.server.http import Reply
from paceline.server.json_body import parse
from paceline.server.service import Lane, Service

_AT_ONCE = 8
"""Maximum texts per request in the scheduler."""


def embeddings(service: Service) -> Endpoint:
    def read(text: bytes) -> tuple[EmbeddingsBody, list[BatchRequest]]:
        body = parse(EmbeddingsBody, text)
        return body, service.embeddings(body)

    async def work(text: bytes, reply: Reply) -> None:
        body, requests = await service.readers.run(Lane.for_body(text), read, text)
        embedded = await _embedded(service, requests)
        vectors = [_shortened(embedding.vector, body.dimensions) for embedding in embedded]
        tokens = sum(embedding.tokens for embedding in embedded)
        data = [
            {"object": "embedding", "index": index, "embedding": _encoded(vector, body)}
            for index, vector in enumerate(vectors)
        ]
        used = {"prompt_tokens": tokens, "total_tokens": tokens}
        await reply.json({"object": "list", "data": data, "model": service.name, "usage": used})

    return Endpoint(service, work)


async def _embedded(service: Service, requests: Sequence[BatchRequest]) -> list[Embedding]:
    """Return the embeddings, computed `_AT_ONCE` at a time; the first error ends all of them."""
    places = asyncio.Semaphore(_AT_ONCE)

    async def one(request: BatchRequest) -> Embedding:
        async with places:
            embedding = await result_of(service, request)
        assert isinstance(embedding, Embedding)
        service.metrics.on_embedding(embedding)
        return embedding

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(request)) for request in requests]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _shortened(vector: npt.NDArray[np.float32], dimensions: int | None) -> npt.NDArray[np.float32]:
    """Return the first `dimensions` numbers, normalized to length 1 again."""
    if dimensions is None:
        return vector
    if dimensions > len(vector):
        raise field_error(
            "dimensions", f"is {dimensions}, and the model's vectors have {len(vector)}"
        )
    return normalized(vector[:dimensions])


def _encoded(vector: npt.NDArray[np.float32], body: EmbeddingsBody) -> Any:
    """Return a list of numbers, or base64 of little-endian float32, as OpenAI's clients expect."""
    if body.encoding_format == "base64":
        return b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
