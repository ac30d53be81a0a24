"""Memory of a server after a storm of requests: what only they needed is given back."""

import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from paceline.models import cache_dir
from paceline.models.names import DEFAULT_MODEL
from support.command import Command, served
from support.server import HTTP, request
from support.waiting import until

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

_GROWTH = 200 << 20
"""Bytes: two contexts of llama.cpp's, with memory for calls of 256 rows, and parked prompts."""


def own_bytes(command: Command) -> int:
    """Resident memory of a server that is not of mapped files."""
    lines = Path(f"/proc/{command.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


def asked(number: int) -> bytes:
    """A stream for a prompt that no other one begins with."""
    return request({"prompt": f"{number} " + "word " * 150, "stream": True, "max_tokens": 100})


def test_memory_comes_back_after_streams_that_nobody_read_and_cancelled_ones():
    with served(DEFAULT_MODEL, cache_dir(), "--port", "0") as command:
        address = ("127.0.0.1", int(command.url.rpartition(":")[2]))
        HTTP.post(command.url + "/v1/completions", json={"prompt": "a", "max_tokens": 4})
        before = own_bytes(command)
        for _ in range(3):
            with ExitStack() as stack:
                for number in range(40):
                    client = stack.enter_context(socket.create_connection(address))
                    client.sendall(asked(number))
                time.sleep(2)
        until(lambda: own_bytes(command) < before + _GROWTH)
