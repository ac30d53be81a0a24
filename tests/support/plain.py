"""Prompts and options for the tests of `runtime`, with responses of plain decoding to compare."""

from typing import Any

from paceline.engines import EngineSettings, open_engine
from paceline.models import ModelFiles
from paceline.options import Options
from paceline.runtime.model import Model
from paceline.runtime.result import Result

PROMPT = "this is one and the user"
PROMPTS = [PROMPT, "Hello", "2 + 2 = 12, and the", "is this the one? is this the one?"]
SAMPLED: Options = {"temperature": 0.9, "seed": 3, "top_p": 0.95}
DRAFTERS = ("auto", "ngram", "suffix", "suffix:earlier", "ngram:min=1", "suffix+ngram:max=2")
END = 2  # the id of <|im_end|>


def plain(model: Model, prompt: Any = PROMPT, **options: Any) -> Result:
    return model.generate(prompt, **{"max_tokens": 60, "drafter": "none", **options})


def said(stream: Any) -> Result:
    for _ in stream:
        pass
    result: Result = stream.result
    return result


def small(files: ModelFiles, tokens: int) -> Model:
    settings = EngineSettings(cache_tokens=tokens)
    return Model(files, open_engine("llamacpp", files.path, files.context_length, settings))
