"""Makes the table of a chat model from answers to prompts that it writes.

    python recipes/smollm2-135m/make.py MODEL OUT --hours 8

It is `paceline learn` with more openings. The same command goes on; OUT/table is the table.
"""

import argparse
import sys
from pathlib import Path

from openings import DICTIONARIES, write_openings

from paceline.drafters.table import KIND
from paceline.errors import InvalidRequest, PacelineError
from paceline.models import DEFAULT_MODEL, Progress
from paceline.runtime.load import load
from paceline.storage.manifest import begin_artifact
from paceline.verify.suite import load_suite
from paceline_lab.learn.data import AT_ONCE, CACHE_TOKENS, DataMaker, variety_of
from paceline_lab.learn.folder import LearnedFolder
from paceline_lab.learn.table import count, divided

TABLE_BYTES = 6_800_000


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a chat model: name or GGUF file")
    parser.add_argument("out", type=Path, help="folder for prompts, answers and `table`")
    parser.add_argument("--hours", type=float, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--unseen",
        type=Path,
        action="append",
        default=[],
        help="questions that must not be learnt from, beside our suite's: Spec-Bench's "
        "question.jsonl",
    )
    parser.add_argument("--dictionaries", type=Path, default=DICTIONARIES)
    try:
        make(parser.parse_args())
    except PacelineError as error:
        sys.stderr.write(f"make.py: {error}\n")
        return 2
    return 0


def make(options: argparse.Namespace) -> None:
    """Make the table.

    Raises ModelError or InvalidRequest for a model or files that cannot be used.
    """
    if not options.hours > 0:
        raise InvalidRequest(f"--hours is {options.hours}; expected more than 0")
    table, progress = options.out / "table", Progress(sys.stderr)
    begin_artifact(table, KIND)
    unseen = [load_suite(path) for path in (None, *options.unseen)]
    with load(
        options.model,
        min_rows=1,
        cache_tokens=CACHE_TOKENS,
        contexts=AT_ONCE,
        drafters=("none",),
        progress=progress,
    ) as model:
        openings = write_openings(model.files, options.dictionaries, options.seed)
        folder = LearnedFolder(model.files, options.out / "answers")
        variety = variety_of(folder, unseen)
        seconds = 0.95 * options.hours * 3600
        maker = DataMaker(model, folder, variety, seconds=seconds, progress=progress)
        maker.run([], openings)
        vocab_size = model.engine.vocab_size
    training, sets = divided(folder.answers())
    if not training:
        raise InvalidRequest(f"{options.hours} hours are too few for answers; use more")
    count(
        folder,
        table,
        target=DEFAULT_MODEL,
        vocab_size=vocab_size,
        training=training,
        sets=sets,
        size=TABLE_BYTES,
    )
    progress.note(f"a table of {len(training)} answers is in {table}")


if __name__ == "__main__":
    sys.exit(main())
