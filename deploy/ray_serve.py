"""Serve a model on the machines of a Ray cluster: one replica per machine, in one port.

    pip install 'paceline[ray]' 'ray[serve]'
    cd deploy && serve run ray_serve:build model=smollm2-135m replicas=2

A conversation stays with the replica that has its prefix in the cache: requests are spread by the
header X-Session-Id. The variable PACELINE_API_KEY has the key, if clients need one.
"""

import os
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.deployment import Application
from starlette.types import ASGIApp

import paceline
from paceline.server.app import make_app
from paceline.server.run import CONTEXTS
from paceline.server.service import Service
from paceline.server.settings import Settings, api_keys

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"


def build(options: dict[str, Any]) -> Application:
    """Return the application. Options: `model`, `replicas`, `cpus` of a replica, `cache_tokens`."""
    settings = Settings(api_keys=api_keys((), None, os.environ))
    cpus, slots = int(options.get("cpus", 1)), options.get("cache_tokens")

    def server() -> ASGIApp:
        model = paceline.load(
            options["model"],
            contexts=CONTEXTS,
            threads=cpus,
            cache_tokens=None if slots is None else int(slots),
        )
        scheduler = model.open_scheduler(
            max_waiting=settings.queue, max_running=settings.max_concurrent
        )
        scheduler.start(warm_up=True)
        return make_app(Service(model, scheduler, settings))

    @serve.deployment(
        num_replicas=int(options.get("replicas", 1)),
        max_ongoing_requests=settings.max_concurrent + settings.queue,
        ray_actor_options={"num_cpus": cpus},
        max_replicas_per_node=1,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
    )
    @serve.ingress(server)
    class Paceline:
        """A replica."""

    return Paceline.bind()  # type: ignore[attr-defined]
