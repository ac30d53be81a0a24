"""Ask several questions about one document, each with `generate`: seconds and cached tokens.

    python benchmarks/document_questions.py [--model smollm2-135m]

The first question computes the document, the others only what follows it. Exits with 1 if a token
differs from an answer without the cache.
"""

import argparse
import json
import sys
from pathlib import Path
from time import perf_counter

import paceline

QUESTIONS = ("What is this about?", "Name one change.", "Which commands are there?")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--characters", type=int, default=9_000)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    path = Path(__file__).parents[1] / "CHANGELOG.md"
    document = path.read_text(encoding="utf-8")[: options.characters]
    model = paceline.load(options.model)
    rows, differing = [], 0
    for question in QUESTIONS:
        prompt = f"{document}\n\n{question}"
        began = perf_counter()
        answer = model.generate(prompt, max_tokens=16, generation_config="none")
        seconds = perf_counter() - began
        alone = model.without_history().generate(prompt, max_tokens=16, generation_config="none")
        differing += alone.token_ids != answer.token_ids
        rows.append(
            {
                "question": question,
                "prompt_tokens": answer.prompt_tokens,
                "cached_tokens": answer.stats.cached_tokens,
                "seconds": round(seconds, 2),
                "first_token_seconds": round(answer.stats.first_token_seconds, 2),
                "first_token_seconds_without_cache": round(alone.stats.first_token_seconds, 2),
                "exact": answer.exact,
            }
        )
    record = {
        "command": f"python benchmarks/document_questions.py {' '.join(sys.argv[1:])}".strip(),
        "model": options.model,
        "differing": differing,
        "questions": rows,
    }
    print(json.dumps(record, indent=1))
    if options.output:
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
