"""schemathesis makes requests of the server's own OpenAPI, right ones and wrong ones.

    python benchmarks/clients/schemathesis_fuzz.py

No request may be answered with a 5xx, or with another kind of content than the OpenAPI says. What
is served is the tests' tiny model: answers whose length nobody limits go on to the context's end.
"""

import os
import sys
import tempfile
from pathlib import Path

from trial import Trial, main

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from support.tiny import write_tiny

CHECKS = ("not_a_server_error", "content_type_conformance")
EXAMPLES = 50
"""Made for each operation, beside those that cover its fields one by one."""


def work(trial: Trial) -> None:
    """One run."""
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
        main(__doc__, ["schemathesis==4.32.*"], work, ["--model", str(tiny)])
