"""Answer a data set of prompts on several machines with Ray: each actor has a model.

    pip install . "ray[data]"
    python examples/11_ray.py prompts.jsonl answers/ --actors 2     # lines of {"prompt": "..."}

Ray's own tasks need a processor beside the actors'. Started again after a stop, it answers what is
not in `answers/` yet. Machines of one kind give a prompt one answer, whichever of them has it.
"""

import argparse
import json
from pathlib import Path

import ray

import paceline


class Answers:
    """A model in a process of its own."""

    def __init__(self, name: str) -> None:
        self.model = paceline.load(name, contexts=4)

    def __call__(self, batch: dict) -> dict:
        """Answer a batch of rows."""
        results = self.model.generate([*batch["prompt"]], max_tokens=100, temperature=0)
        return {"prompt": batch["prompt"], "text": [result.text for result in results]}


parser = argparse.ArgumentParser()
parser.add_argument("prompts", type=Path)
parser.add_argument("answers", type=Path)
parser.add_argument("--model", default="smollm2-135m")
parser.add_argument("--actors", type=int, default=2)
parser.add_argument("--cpus", type=int, default=1, help="of an actor, for Ray's plan")
options = parser.parse_args()

answered = {
    json.loads(line)["prompt"]
    for path in options.answers.glob("*.json")
    for line in path.read_text().splitlines()
}
prompts = [json.loads(line)["prompt"] for line in options.prompts.read_text().splitlines()]
left = [{"prompt": prompt} for prompt in dict.fromkeys(prompts) if prompt not in answered]
print(f"{len(answered)} are answered, {len(left)} are left")
if left:
    # A block becomes a file when its answers are there: so much is lost by a stop.
    ray.data.from_items(left).repartition(-(-len(left) // 16)).map_batches(
        Answers,
        fn_constructor_args=[options.model],
        batch_size=16,
        concurrency=options.actors,
        num_cpus=options.cpus,
    ).write_json(str(options.answers.resolve()), mode="append")
