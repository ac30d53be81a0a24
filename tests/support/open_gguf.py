"""Open the GGUF files whose paths arrive on standard input, one per line; run by path.

Prints a line of JSON for each: the report, seconds of CPU time, and the process's peak memory in
kilobytes. It is a separate process, so that a crash fails a test and does not end all of them.
"""

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from paceline.errors import PacelineError
from paceline.runtime.load import load


def opened(path: str) -> dict[str, Any]:
    try:
        model = load(path, cache_tokens=256)
        result = model.generate("a", raw=True, max_tokens=2, drafter="none", temperature=0.0)
    except PacelineError as error:
        return {"error": str(error)}
    except Exception:
        return {"fault": traceback.format_exc()}
    return {"tokens": len(result.token_ids)}


def peak() -> int:
    """Most kilobytes so far. `getrusage` would count the process that started this one."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


# A library's prints on standard output must not mix with the report.
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    started = time.process_time()
    told = opened(line.rstrip("\n"))
    seconds = time.process_time() - started
    answers.write(json.dumps({**told, "seconds": seconds, "peak": peak()}) + "\n")
    answers.flush()
