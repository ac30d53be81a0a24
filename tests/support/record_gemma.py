"""Records the best tokens of llama.cpp for Gemma 3 270M, as tests/test_real_gemma.py reads them.

    pip install llama-cpp-python
    PYTHONPATH=src:tests python -m support.record_gemma

Each text is a prompt with llama.cpp's greedy answer, or a long text past the model's window. For
each position tests/data/gemma3_270m.json gets the best next token, and its margin: how far its
logit is above the second best.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from paceline.verify.suite import load_suite
from support.gemma import PROMPTS, gemma_file

DATA = Path(__file__).parent.parent / "data" / "gemma3_270m.json"
ANSWER, LONG = 24, 1100
"""Tokens of an answer, and of the long text."""


def main() -> None:
    import llama_cpp

    model = llama_cpp.Llama(
        str(gemma_file()), n_ctx=LONG + 1, n_batch=512, logits_all=True, verbose=False
    )
    texts = [recorded(model, prompt, answer=ANSWER) for prompt in PROMPTS]
    suite = "\n\n".join(str(prompt.messages[-1]["content"]) for prompt in load_suite().prompts)
    texts.append(recorded(model, suite, most=LONG))
    about = f"llama-cpp-python {llama_cpp.__version__}"
    lines = ",\n".join(json.dumps(text) for text in texts)
    DATA.write_text(f'{{"about": "{about}", "texts": [\n{lines}\n]}}\n', encoding="utf-8")


def recorded(model: Any, text: str, *, answer: int = 0, most: int | None = None) -> dict[str, Any]:
    """The text's tokens, at most `most`, those of an answer, and what is best after each."""
    tokens = model.tokenize(text.encode(), add_bos=True, special=False)[:most]
    if most is not None:
        text = model.detokenize(tokens[1:]).decode()
    prompt = len(tokens)
    model.reset()
    model.eval(tokens)
    for _ in range(answer):
        tokens.append(int(np.argmax(model.scores[model.n_tokens - 1])))
        model.eval(tokens[-1:])
    scores = np.sort(model.scores[: len(tokens)], axis=1)[:, -2:]
    return {
        "text": text,
        "prompt": prompt,
        "tokens": tokens,
        "best": model.scores[: len(tokens)].argmax(axis=1).tolist(),
        "margins": [round(float(best - second), 2) for second, best in scores],
    }


if __name__ == "__main__":
    main()
