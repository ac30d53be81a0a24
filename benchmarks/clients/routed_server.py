"""A server of two tiny models, one of which is loaded at a time: `paceline serve --all`.

python benchmarks/clients/routed_server.py
"""

import os
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "tests"))
from paceline.models import ModelEntry
from paceline.server.router.run import RouterServer
from paceline.server.run import print_line
from paceline.server.settings import Settings
from support.tiny import write_tiny


def main() -> None:
    """Serve on a free port until SIGTERM."""
    with tempfile.TemporaryDirectory() as made:
        os.environ["PACELINE_CACHE"] = made
        paths = [write_tiny(Path(made) / f"tiny-{seed}.gguf", seed=seed) for seed in (0, 1)]
        listed = [ModelEntry(str(path), True, "", None, path.stat().st_size) for path in paths]
        RouterServer(
            listed[0].name,
            ("--cache-tokens", "2048"),
            settings=Settings(),
            listed=lambda: listed,
            on_line=print_line,
        ).run(signals=True)


if __name__ == "__main__":
    main()
