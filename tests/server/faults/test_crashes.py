"""A native library that ends the server's process: one line, a code, and files that are whole."""

import sys
from pathlib import Path

import httpx
import pytest

from support.command import started
from support.waiting import PATIENCE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX"),
]

BODY = {"prompt": "the rain in the", "max_tokens": 8, "temperature": 0}

SERVER = """
import ctypes, sys
from paceline.__main__ import main
{patch}
sys.argv = ["paceline", "serve", "--port", "0", *sys.argv[1:]]
sys.exit(main())
"""

PATCH = """
from paceline.engines.llamacpp import native
decode = native.NativeContext.decode
def fails(context, work):
    if any(tokens[:4] == [3, 250, 4, 250] for _, tokens, _ in work):
        {call}
    return decode(context, work)
native.NativeContext.decode = fails
"""
CALLS = {
    "an assert failed": "ctypes.CDLL(context.binding.library._name)"
    '.ggml_abort(b"ggml.c", 1234, b"GGML_ASSERT(%s) failed", b"planted")',
    "a bad address": "ctypes.string_at(8)",
}
"""Cause -> how a library crashes."""


@pytest.mark.parametrize("cause", CALLS)
def test_a_crash_of_a_library_ends_the_server_with_one_line_and_a_code(
    tmp_path: Path, tiny_gguf: Path, cause: str
):
    options = ["--model", str(tiny_gguf)]

    def command_line(patch: str) -> list[str]:
        return [sys.executable, "-c", SERVER.format(patch=patch), *options]

    with started(command_line(PATCH.format(call=CALLS[cause])), tmp_path) as server:
        url = f"{server.url}/v1/completions"
        answer = httpx.post(url, json=BODY, timeout=PATIENCE).json()["choices"]
        with pytest.raises(httpx.HTTPError):
            httpx.post(url, json={**BODY, "prompt": [3, 250, 4, 250]}, timeout=PATIENCE)
        assert server.end() == 70
    assert (
        f"\npaceline: the engine's library has crashed: {cause}. Files of models and prompts are "
        "whole; start it again, or with another --engine\n"
    ) in server.said
    assert "Traceback" not in server.said
    with started(command_line(""), tmp_path) as server:
        url = f"{server.url}/v1/completions"
        assert httpx.post(url, json=BODY, timeout=PATIENCE).json()["choices"] == answer
