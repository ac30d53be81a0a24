"""Puts text on the clipboard: with the system's program, otherwise through the terminal.

A terminal is asked with OSC 52 (xterm's control sequences, "Manipulate Selection Data"), which also
works over ssh; one that does not know it does nothing.
"""

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

_SECONDS = 5.0


def copy(text: str) -> str:
    """Copy a text; returns how, in a word or two."""
    for words in _programs():
        if shutil.which(words[0]) is None:
            continue
        try:
            subprocess.run(
                words, input=text.encode(), check=True, timeout=_SECONDS, stdout=subprocess.DEVNULL
            )
        except (OSError, subprocess.SubprocessError):
            continue
        return f"with {words[0]}"
    encoded = base64.b64encode(text.encode("utf-8", "replace")).decode()
    screen = sys.stdout if sys.stdout.isatty() else sys.stderr
    print(f"\x1b]52;c;{encoded}\a", end="", file=screen, flush=True)
    return "through the terminal, if it allows that"


def _programs() -> Iterator[list[str]]:
    if sys.platform == "darwin":
        yield ["pbcopy"]
    elif sys.platform == "win32":
        yield ["clip"]
    elif os.environ.get("WAYLAND_DISPLAY"):
        yield ["wl-copy"]
    elif os.environ.get("DISPLAY"):
        yield ["xclip", "-selection", "clipboard"]
        yield ["xsel", "--clipboard", "--input"]
