"""Answers requests for another process, within limits of time and memory that the kernel holds.

`WorkerProcess` runs it as a script, so that it starts without importing paceline. Its arguments are
the path of a handler, a module that imports none of it either, and the handler's own. A handler has

    MEMORY              bytes of address space, of this process and of its child
    STACK               bytes of its thread's stack
    start(*arguments)   makes the function from a request to its answer, both JSON objects

Reads one request per line from standard input, writes one answer per line to standard output, and
ends with its input. A child of this process answers; the kernel ends it after the "seconds" of a
request, of CPU time, and it has what `start` made from its parent, so that the next one is ready at
once. For a child that has ended see `WorkerProcess.ask`.
"""

import gc
import json
import mmap
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

Answer = Callable[[dict[str, Any]], dict[str, Any]]


def main() -> None:
    """Answer requests until the input ends."""
    spec = spec_from_file_location("handler", sys.argv[1])
    assert spec is not None
    assert spec.loader is not None
    handler = module_from_spec(spec)
    spec.loader.exec_module(handler)
    if sys.platform != "win32":
        import resource

        with suppress(ValueError, OSError):  # macOS has no such limit
            resource.setrlimit(resource.RLIMIT_AS, (handler.MEMORY, handler.MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until there is a child to end
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF, signal.SIGUSR1})
    threading.stack_size(handler.STACK)
    answer: Answer = handler.start(*sys.argv[2:])
    if sys.platform == "win32":
        _serve(answer, lambda: None)
    else:
        _serve_in_children(answer)


def _serve_in_children(answer: Answer) -> None:
    """Serve in a child; when it is ended, write how, and serve on in another."""
    if sys.platform == "win32":
        raise OSError("this system has no fork")
    child, is_interrupted = 0, False

    def interrupt(*_: object) -> None:
        nonlocal is_interrupted
        if child:
            is_interrupted = True
            os.kill(child, signal.SIGKILL)

    signal.signal(signal.SIGUSR1, interrupt)
    read = mmap.mmap(-1, 8)  # requests, counted by the children

    def count() -> None:
        read[:] = (int.from_bytes(read[:]) + 1).to_bytes(8)

    gc.freeze()  # else a child's collector copies pages that it shares with its parent
    while True:
        child = os.fork()
        if not child:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
            os._exit(0 if _serve(answer, count) else 1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        child = 0
        if code == 0:
            return
        _write({"ended": code, "interrupted": is_interrupted, "read": int.from_bytes(read[:])})
        is_interrupted = False


def _serve(answer: Answer, count: Callable[[], None]) -> bool:
    """Answer requests until the input ends; whether it has. Each that is read is counted."""
    has_ended = False

    def work() -> None:
        nonlocal has_ended
        for line in sys.stdin.buffer:
            count()
            request = json.loads(line)
            _end_after(request["seconds"])
            reply = answer(request)
            _end_after(0)
            _write(reply)
        has_ended = True

    thread = threading.Thread(target=work)  # for its stack
    thread.start()
    thread.join()
    return has_ended


def _write(answer: dict[str, Any]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


def _end_after(seconds: float) -> None:
    """Have a signal end this process after CPU seconds, even inside C code; 0: not any more."""
    if sys.platform != "win32":  # where the parent ends it
        signal.setitimer(signal.ITIMER_PROF, seconds)


if __name__ == "__main__":
    main()
