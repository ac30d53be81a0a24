"""lm-evaluation-harness scores a small local task through the server's completions.

    python benchmarks/clients/lm_evaluation_harness.py

Multiple choice by log-likelihood, and generated answers, to the twelve questions below. Prompts are
sent as token ids in batches, as concurrent requests, and as text; they are tokenized by the server
or with the model's tokenizer.json. Every log-likelihood, answer and score must equal that of
paceline's Python API for the same item, to the last bit.
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from trial import Trial, main

import paceline
from paceline.models import DEFAULT_MODEL

INTRODUCTION = "Question: What do cows give?\nAnswer: milk\n"
ITEMS = [
    ("What is the capital of France?", ["Paris", "London", "Berlin", "Rome"], 0),
    ("What colour is the sky on a clear day?", ["green", "blue", "red", "dark brown"], 1),
    ("How many legs does a spider have?", ["four", "six", "eight", "ten"], 2),
    ("What do bees make?", ["bread", "wool", "honey", "paper money"], 2),
    ("Which planet is closest to the sun?", ["Mercury", "Venus", "Earth", "Jupiter"], 0),
    ("What is frozen water called?", ["steam", "ice", "sand", "a cloud"], 1),
    ("Which animal barks?", ["a cat", "a cow", "a fish", "a dog"], 3),
    ("What is two plus three?", ["four", "five", "six", "twenty-three"], 1),
    ("Which of these is a fruit?", ["a hammer", "an apple", "a shoe", "a river"], 1),
    ("In which season does snow fall?", ["summer", "winter", "the afternoon", "May"], 1),
    ("Which is heavier, a feather or a stone?", ["a feather", "a stone", "neither", "both"], 1),
    ("What does a thermometer measure?", ["time", "length", "temperature", "speed"], 2),
]
CHOICE, WORDS, TOKENS = "paceline_choice", "paceline_words", 12
MEAN = {"aggregation": "mean", "higher_is_better": True}
TASKS: dict[str, dict[str, Any]] = {
    CHOICE: {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "gold",
        "metric_list": [{"metric": "acc", **MEAN}, {"metric": "acc_norm", **MEAN}],
    },
    WORDS: {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[gold]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": TOKENS, "temperature": 0},
        "filter_list": [
            {
                "name": "none",
                "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}],
            }
        ],
        "metric_list": [{"metric": "exact_match", **MEAN}],
    },
}
MODES = {
    "token ids in batches of 8": ({}, 8),
    "token ids, 4 requests at once": ({"num_concurrent": 4}, 1),
    "text": ({"tokenized_requests": False}, 1),
    "token ids by tokenizer.json": ({"tokenizer_backend": "huggingface"}, 8),
}
"""Mode -> further model arguments, and prompts per request."""


class Scores(NamedTuple):
    """Results of all items."""

    likelihoods: list[list[float]]
    """Log-likelihoods of each item's choices, in nats."""
    greedy: list[list[bool]]
    """True for each choice that greedy decoding would generate."""
    answers: list[str]
    metrics: dict[str, float]


def work(trial: Trial) -> None:
    """Compare the task in every mode with the Python API, item by item."""
    model = paceline.load()
    expected = _alone(model)
    print(f"alone: {expected.metrics}")
    trial.check(0.25 < expected.metrics["acc"] < 1, "the task is neither trivial nor too hard")
    _write(trial.folder / "tasks", model.files.folder / "tokenizer.json")
    for number, (mode, (more, batch)) in enumerate(MODES.items()):
        out = trial.folder / f"out-{number}"
        for old in out.rglob("*.json*"):
            old.unlink()
        arguments = {
            "model": DEFAULT_MODEL,
            "base_url": f"{trial.server.url}/completions",
            **more,
            **({"tokenizer": trial.folder / "tasks"} if "tokenizer_backend" in more else {}),
        }
        done = trial.run(
            "lm_eval",
            *("--model", "local-completions", "--tasks", f"{CHOICE},{WORDS}"),
            *("--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())),
            *("--batch_size", str(batch), "--include_path", str(trial.folder / "tasks")),
            *("--output_path", str(out), "--log_samples"),
        )
        if done.returncode == 0:
            found = _read(out)
            for name, mine, theirs in zip(Scores._fields, found, expected, strict=True):
                trial.equal(mine, theirs, f"{mode}: {name} are those of each item alone")


def _prompt(question: str) -> str:
    return f"{INTRODUCTION}Question: {question}\nAnswer:"


def _alone(model: paceline.Model) -> Scores:
    """The results of the Python API."""
    likelihoods, greedy, answers = [], [], []
    for question, choices, _ in ITEMS:
        prompt = _prompt(question)
        scored = [_scored(model, prompt, f" {choice}") for choice in choices]
        likelihoods.append([likelihood for likelihood, _ in scored])
        greedy.append([best for _, best in scored])
        made = model.generate(
            prompt, raw=True, max_tokens=TOKENS, stop="\n", drafter="none", temperature=0.0
        )
        answers.append(made.text.strip())
    per_letter = [
        [value / len(choice) for value, choice in zip(values, choices, strict=True)]
        for values, (_, choices, _) in zip(likelihoods, ITEMS, strict=True)
    ]
    gold = [gold for *_, gold in ITEMS]
    metrics = {
        "acc": _share(_largest(values) == at for values, at in zip(likelihoods, gold, strict=True)),
        "acc_norm": _share(
            _largest(values) == at for values, at in zip(per_letter, gold, strict=True)
        ),
        "exact_match": _share(
            answer == choices[at] for answer, (_, choices, at) in zip(answers, ITEMS, strict=True)
        ),
    }
    return Scores(likelihoods, greedy, answers, metrics)


def _scored(model: paceline.Model, prompt: str, choice: str) -> tuple[float, bool]:
    """Log-likelihood of a continuation, and whether it is the greedy one."""
    tokens = model.tokens(prompt + choice, raw=True)
    found = model.generate(
        tokens, max_tokens=1, logprobs=1, prompt_logprobs=True, drafter="none", temperature=0.0
    ).prompt_logprobs
    known = [each for each in found[len(model.tokens(prompt, raw=True)) :] if each is not None]
    greedy = all(each.logprob == max(likely for _, likely in each.top) for each in known)
    return sum(each.logprob for each in known), greedy


def _write(folder: Path, tokenizer: Path) -> None:
    """Write the tasks, their items, and the tokenizer in transformers' format."""
    folder.mkdir(exist_ok=True)
    items = folder / "items.jsonl"
    rows = [
        {"prompt": _prompt(question), "choices": choices, "gold": gold}
        for question, choices, gold in ITEMS
    ]
    items.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    shared = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(items)}},
        "test_split": "test",
        "doc_to_text": "{{prompt}}",
    }
    for name, task in TASKS.items():  # JSON is YAML, too
        text = json.dumps({"task": name, **shared, **task})
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    (folder / "tokenizer.json").write_bytes(tokenizer.read_bytes())
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind), encoding="utf-8")


def _read(out: Path) -> Scores:
    """Read the results of the harness."""
    choice, words = (_samples(out, name) for name in (CHOICE, WORDS))
    (summary,) = out.rglob("results_*.json")
    results = json.loads(summary.read_text())["results"]
    metrics = {
        name: float(results[task][f"{name},none"])
        for task, name in ((CHOICE, "acc"), (CHOICE, "acc_norm"), (WORDS, "exact_match"))
    }
    pairs = [sample["filtered_resps"] for sample in choice]
    return Scores(
        [[float(likelihood) for likelihood, _ in row] for row in pairs],
        [[greedy == "True" for _, greedy in row] for row in pairs],
        [sample["filtered_resps"][0] for sample in words],
        metrics,
    )


def _samples(out: Path, task: str) -> list[dict[str, Any]]:
    (path,) = out.rglob(f"samples_{task}_*.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return sorted(rows, key=lambda row: int(row["doc_id"]))


def _largest(values: Sequence[float]) -> int:
    return max(range(len(values)), key=values.__getitem__)


def _share(right: Iterable[bool]) -> float:
    return mean(float(each) for each in right)


if __name__ == "__main__":
    main(__doc__, ["lm_eval[api]==0.4.13", "transformers"], work)
