"""Runs a program, and ends it when the other end of standard input is closed.

A process that is killed cannot end its children; but its pipes are closed, and that this one
notices. It is the first process of a session, which it ends whole: the program may be a script that
starts the real one. It imports nothing of ours, so that it starts in 20 ms.
"""

import os
import signal
import subprocess
import sys
import threading


def keep(command: list[str]) -> int:
    """Run a command to its end, or to the end of standard input.

    Returns its exit code: of one that a signal ended, 128 plus its number.
    """
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=_end_with_input, args=(child,), daemon=True).start()
    code = child.wait()
    return code if code >= 0 else 128 - code


def _end_with_input(child: "subprocess.Popen[bytes]") -> None:
    while os.read(0, 1):  # not by sys.stdin, whose lock the end of the interpreter needs
        pass
    # It has nothing to save.
    if sys.platform == "win32":
        child.kill()
    else:
        os.killpg(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1:]))
