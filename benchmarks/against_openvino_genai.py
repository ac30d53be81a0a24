"""paceline against OpenVINO GenAI's own prompt lookup: same graph, same prompts, in turns.

python benchmarks/against_openvino_genai.py --output benchmarks/results/openvino-genai.json
"""

import numpy as np
import openvino as ov
import openvino_genai as genai
from peers import OURS, OURS_PLAIN, Ours, Peer, arguments, report, run

import paceline
from paceline.bench.suite import load_suite
from paceline.models import ModelFiles

PLAIN, LOOKUP = "genai plain", "genai lookup"
"""With its own settings: an 8-bit cache, and whatever precision the processor is fastest at."""
PLAIN_16, LOOKUP_16 = "genai plain, f16 cache", "genai lookup, f16 cache"
"""With the precision that paceline asks for."""


class GenAi:
    """One GenAI pipeline, greedy; prompt lookup as its documentation sets it up."""

    def __init__(self, files: ModelFiles, *, lookup: bool, precise: bool = False) -> None:
        options: dict[str, object] = {"prompt_lookup": True} if lookup else {}
        if precise:
            options |= {"KV_CACHE_PRECISION": "f16", "INFERENCE_PRECISION_HINT": "f32"}
        self._pipeline = genai.LLMPipeline(str(files.folder), "CPU", **options)
        self._config = genai.GenerationConfig()
        self._config.do_sample = False
        self._config.eos_token_id = files.stop_token_ids[-1]
        self._config.stop_token_ids = set(files.stop_token_ids)
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


def main() -> None:
    """Run, print, and write the result where asked."""
    options = arguments(__doc__)
    suite = load_suite()
    model = paceline.load()
    model.measure()
    contenders = {
        PLAIN: GenAi(model.files, lookup=False),
        LOOKUP: GenAi(model.files, lookup=True),
        PLAIN_16: GenAi(model.files, lookup=False, precise=True),
        LOOKUP_16: GenAi(model.files, lookup=True, precise=True),
        OURS: Ours(model, "auto"),
        OURS_PLAIN: Ours(model, "none"),
    }
    rows = run(model, suite, contenders, [Peer(LOOKUP, PLAIN), Peer(LOOKUP_16, PLAIN_16)], options)
    about = {
        "command": "python benchmarks/against_openvino_genai.py",
        "openvino_genai": genai.__version__,
        "engine": model.engine.describe(),
        "suite_sha256": suite.sha256,
    }
    report(rows, about, options)


if __name__ == "__main__":
    main()
