"""schemathesis generates valid and invalid requests from the server's OpenAPI document.

    python benchmarks/clients/schemathesis_fuzz.py

No response may have a 5xx status or a content type that is not in the document. The model is the
tests' tiny one: answers without a limit go on to the end of the context.
"""

import os
import sys
import tempfile
from pathlib import Path

from trial import Trial, main

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from support.tiny import write_tiny

PACKAGES = ("schemathesis==4.32.*",)
CHECKS = ("not_a_server_error", "content_type_conformance")
EXAMPLES = 50
"""Generated requests per operation, besides those that cover its fields one by one."""


def work(trial: Trial) -> None:
    """Run it once."""
    done = trial.run(
        "schemathesis",
        *("run", f"{trial.server.root}/openapi.json", "--max-examples", str(EXAMPLES)),
        *("--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing", "--seed", "1"),
        *("--workers", "2", "--no-color", "--request-timeout", "60"),
    )
    print(done.stdout.partition("= SUMMARY =")[2])


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        os.environ["PACELINE_CACHE"] = made
        tiny = write_tiny(Path(made) / "tiny.gguf")
        main(__doc__, PACKAGES, work, ["--model", str(tiny)])
