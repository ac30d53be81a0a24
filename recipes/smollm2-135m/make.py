"""Makes the table of a chat model from conversations with itself, on a GPU.

    python recipes/smollm2-135m/make.py MODEL.gguf OUT --minutes 4

It needs CUDA, torch and triton, and writes OUT/table. README.md has what was measured.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from paceline.drafters.table import KIND, MAX_ORDER, entry_bytes
from paceline.drafters.table_counts import accuracy, count_table
from paceline.errors import InvalidRequest, MissingExtra, PacelineError
from paceline.models import DEFAULT_MODEL, ModelFiles, resolve
from paceline.storage.manifest import begin_artifact
from paceline.verify.suite import load_suite
from paceline_lab.train.table import write_table

if TYPE_CHECKING:
    from conversations import Corpus
    from decode import Weights
    from openings import Script
    from selection import Spans

BATCH, SLOTS = 1536, 640
"""Conversations at once, and the most tokens of one."""
MEMORY = 32e9
"""Free bytes of the GPU that are needed: keys and values take 23 GB, logits most of the rest."""
CORPUS = 200_000_000
"""Tokens of conversations at most, of 5 bytes each."""
TABLE_BYTES = 6_800_000


class Said(NamedTuple):
    """An answer as `count_table` takes it; arrays of int32."""

    prompt: Any
    """Its last tokens: as many as a table looks at."""
    answer: Any
    tokens: Any


def main() -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, help="GGUF file of a Llama with a chat template")
    parser.add_argument("out", type=Path, help="folder for `table`")
    parser.add_argument("--minutes", type=float, default=4, help="of conversations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--unseen",
        type=Path,
        action="append",
        default=[],
        help="questions that users must not ask, beside our suite's: Spec-Bench's question.jsonl",
    )
    parser.add_argument(
        "--dictionaries", type=Path, default=Path("/usr/share/dict"), help="folder of word lists"
    )
    options = parser.parse_args()
    begin = time.monotonic()

    def say(text: str) -> None:
        sys.stderr.write(f"{time.monotonic() - begin:5.0f} s  {text}\n")

    try:
        make(options, say)
    except PacelineError as error:
        sys.stderr.write(f"make.py: {error}\n")
        return 2
    return 0


def make(options: argparse.Namespace, say: Callable[[str], None]) -> None:
    """Make the table.

    Raises MissingExtra without a GPU or its packages, and ModelError or InvalidRequest for a model
    or files that cannot be used.
    """
    check_machine()
    if not options.minutes > 0:
        raise InvalidRequest(f"--minutes is {options.minutes}; expected more than 0")
    begin_artifact(options.out / "table", KIND)
    import torch
    from decode import read_weights
    from openings import write_script
    from selection import select

    torch.manual_seed(options.seed)
    files = resolve(str(options.model))
    unseen = [*questions(files, options.unseen)]
    script = write_script(files, options.dictionaries, options.seed)
    weights = read_weights(options.model, "cuda")
    say(f"{len(script.openings)} openings")
    corpus = talk(weights, script, 60 * options.minutes, options.seed)
    say(f"{len(corpus.lengths)} conversations, {len(corpus.tokens)} tokens")
    training, held_out = select(corpus, unseen)
    say(f"{len(training.begins)} answers of {training.lengths.sum()} tokens to learn from")
    if not len(training.begins) or not len(held_out.begins):
        raise InvalidRequest(f"{options.minutes} minutes are too few for answers; use more")
    right = make_table(corpus, training, held_out, weights.sizes.vocab, options.out / "table")
    say(f"table: of held-out tokens {right:.1%} are right")


def check_machine() -> None:
    """Raise MissingExtra without a GPU or the packages for it."""
    missing = [name for name in ("torch", "triton") if find_spec(name) is None]
    if not missing:
        import torch

        if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] >= MEMORY:
            return
        missing = [f"a CUDA GPU with {MEMORY / 1e9:.0f} GB of free memory"]
    raise MissingExtra(
        f"{' and '.join(missing)} cannot be found, and this recipe needs a GPU, torch and triton; "
        "`paceline learn` makes drafters without them"
    )


def questions(files: ModelFiles, suites: Sequence[Path]) -> Iterator[list[int]]:
    """Token ids of what users say in paceline's own suite and in others."""
    encode = files.tokenizer().encode
    for suite in (None, *suites):
        for prompt in load_suite(suite).prompts:
            for text in (*(message["content"] for message in prompt.messages), *prompt.turns):
                yield encode(text)


def talk(weights: "Weights", script: "Script", seconds: float, seed: int) -> "Corpus":
    """Conversations of `seconds`."""
    from conversations import Conversations, Corpus, converse

    corpus = Corpus(CORPUS, weights.embedding.device)
    conversations = Conversations(weights, script, batch=BATCH, slots=SLOTS, seed=seed)
    end = time.monotonic() + seconds
    converse(conversations, corpus, lambda: time.monotonic() >= end)
    return corpus


def make_table(
    corpus: "Corpus", training: "Spans", held_out: "Spans", vocab: int, folder: Path
) -> float:
    """Write the table; returns the share of held-out tokens that it predicts."""
    tokens = corpus.tokens.cpu().numpy()

    def answers(spans: "Spans") -> list[Said]:
        return [
            Said(tokens[context:begin], tokens[begin:end], tokens[context:end])
            for context, begin, end in zip(
                spans.begins - MAX_ORDER, spans.begins, spans.ends, strict=True
            )
        ]

    entries = count_table(answers(training)).best(TABLE_BYTES // entry_bytes(vocab))
    quality = accuracy(entries, answers(held_out))
    facts = {
        "made_by": "recipes/smollm2-135m",
        "answers": len(training.begins),
        "answer_tokens": int(training.lengths.sum()),
        "held_out": quality,
    }
    write_table(entries, folder, target=DEFAULT_MODEL, vocab_size=vocab, facts=facts)
    return quality["right"]


if __name__ == "__main__":
    sys.exit(main())
