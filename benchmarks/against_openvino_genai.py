"""paceline against OpenVINO GenAI's own prompt lookup: same graph, same prompts, in turns.

    python benchmarks/against_openvino_genai.py --output benchmarks/results/openvino-genai.json

Ratios are taken within a round. GenAI's lookup counts where its tokens are those of GenAI's own
plain decoding; how many it changes is part of the result.
"""

import argparse
import json
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

import paceline
from paceline.bench.suite import load_suite

PLAIN, LOOKUP, OURS, OURS_PLAIN = "genai plain", "genai lookup", "paceline auto", "paceline plain"


class GenAi:
    """One GenAI pipeline, greedy; prompt lookup as its documentation sets it up."""

    def __init__(self, folder: Path, stops: tuple[int, ...], *, lookup: bool) -> None:
        options = {"prompt_lookup": True} if lookup else {}
        self._pipeline = genai.LLMPipeline(str(folder), "CPU", **options)
        self._config = genai.GenerationConfig()
        self._config.do_sample = False
        self._config.eos_token_id = stops[-1]
        self._config.stop_token_ids = set(stops)
        if lookup:
            self._config.num_assistant_tokens = 5
            self._config.max_ngram_size = 3

    def answer(self, tokens: list[int], max_tokens: int) -> tuple[list[int], float]:
        """Token ids, and tokens per second after the first."""
        self._config.max_new_tokens = max_tokens
        ids = np.array([tokens], dtype=np.int64)
        inputs = genai.TokenizedInputs(ov.Tensor(ids), ov.Tensor(np.ones_like(ids)))
        found = self._pipeline.generate(inputs, self._config)
        metrics = found.perf_metrics
        decode = (metrics.get_generate_duration().mean - metrics.get_ttft().mean) / 1e3
        answer = list(found.tokens[0])
        return answer, (len(answer) - 1) / decode


class Ours:
    """The same through paceline, a fresh request each time."""

    def __init__(self, model: paceline.Model, drafter: str) -> None:
        self._model = model
        self._drafter = drafter

    def answer(self, tokens: list[int], max_tokens: int) -> tuple[list[int], float]:
        """Token ids, and tokens per second after the first."""
        fresh = paceline.Model(self._model.files, self._model.engine)
        found = fresh.generate(tokens, max_tokens=max_tokens, drafter=self._drafter)
        return found.token_ids, found.stats.decode_tokens_per_second


def main() -> None:
    """Run, print a table, and write the result where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    suite = load_suite()
    model = paceline.load(options.model)
    model.measure()
    files = model.files
    contenders = {
        PLAIN: GenAi(files.folder, files.stop_token_ids, lookup=False),
        LOOKUP: GenAi(files.folder, files.stop_token_ids, lookup=True),
        OURS: Ours(model, "auto"),
        OURS_PLAIN: Ours(model, "none"),
    }
    rows = []
    for number, prompt in enumerate(suite.prompts):
        tokens = model.tokens(prompt.messages)
        rates: dict[str, list[float]] = {name: [] for name in contenders}
        answers: dict[str, list[int]] = {}
        for turn in range(options.rounds):
            names = list(contenders)
            shift = (turn + number) % len(names)
            for name in names[shift:] + names[:shift]:
                answers[name], rate = contenders[name].answer(tokens, options.max_tokens)
                rates[name].append(rate)
        rows.append(
            {
                "prompt": prompt.id,
                "kind": prompt.kind,
                "tokens_per_second": {name: median(rates[name]) for name in rates},
                "paceline_over_lookup": _ratio(rates, OURS, LOOKUP),
                "paceline_over_genai_plain": _ratio(rates, OURS, PLAIN),
                "lookup_over_genai_plain": _ratio(rates, LOOKUP, PLAIN),
                "genai_lookup_changed_the_text": answers[LOOKUP] != answers[PLAIN],
                "paceline_changed_the_text": answers[OURS] != answers[OURS_PLAIN],
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    kept = [row for row in rows if not row["genai_lookup_changed_the_text"]]
    result: dict[str, Any] = {
        "command": "python benchmarks/against_openvino_genai.py",
        "openvino_genai": genai.__version__,
        "engine": model.engine.describe(),
        "suite_sha256": suite.sha256,
        "max_tokens": options.max_tokens,
        "rounds": options.rounds,
        "prompts": len(rows),
        "texts_changed_by_genai_lookup": len(rows) - len(kept),
        "texts_changed_by_paceline": sum(row["paceline_changed_the_text"] for row in rows),
        "paceline_over_lookup_where_text_is_kept": _mean(kept, "paceline_over_lookup"),
        "paceline_over_lookup_everywhere": _mean(rows, "paceline_over_lookup"),
        "paceline_over_genai_plain": _mean(rows, "paceline_over_genai_plain"),
        "lookup_over_genai_plain": _mean(rows, "lookup_over_genai_plain"),
        "rows": rows,
    }
    print(json.dumps({key: result[key] for key in result if key != "rows"}, indent=1))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n")


def _ratio(rates: dict[str, list[float]], mine: str, theirs: str) -> float:
    return median(a / b for a, b in zip(rates[mine], rates[theirs], strict=True))


def _mean(rows: list[dict[str, Any]], key: str) -> float | None:
    return geometric_mean(row[key] for row in rows) if rows else None


if __name__ == "__main__":
    main()
