"""Work of a mixture-of-experts call by part, and when speculation pays.

    python benchmarks/zaya_lesson.py --output benchmarks/results/zaya-lesson.json

The lesson of the ZAYA experiment, in counts: a random ZAYA, all widths an eighth of the released
model's and a tenth of its layers, is converted with soft routing and with the routing it was
trained with (top-1), and rehearsed. Needs the extra `coreml` and no Neural Engine: nothing is
timed.
"""

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from paceline.decoding.costs import CostTable, break_even
from paceline.models import QUIET, Facts
from paceline.storage.files import read_json, write_json
from paceline_coreml.conversion.conversion_options import ConversionOptions
from paceline_coreml.conversion.convert import convert
from paceline_coreml.conversion.source import Source
from paceline_coreml.engine.artifact import Artifact
from paceline_coreml.engine.flops import (
    Parts,
    Work,
    count,
    experts_read,
    only_chosen,
    total,
)
from paceline_coreml.engine.parts import EXPERTS
from paceline_coreml.engine.work_report import as_dict, tables
from paceline_lab.simulate.costs import ZAYA

SCALE, LAYERS, ROWS = 8, 4, 4
"""Widths and slots are divided by `SCALE`, and the vocabulary by as much as the layers are besides,
so that shares are about those of the whole model. The numbers of heads and of experts stay."""

SIZES = (
    *("hidden_size", "num_hidden_layers", "vocab_size", "num_experts", "moe_intermediate_size"),
    *("num_attention_heads", "num_key_value_heads", "head_dim", "router_hidden_size"),
)

TOKENS = 241
"""Tokens of the text from which the experts per row are counted: 1 row, then 60 calls of 4."""

FACTS = Facts(
    context_length=2048 // SCALE,
    stop_token_ids=(1,),
    bos_token_id=None,
    add_bos=False,
    bos_token=None,
    eos_token=None,
    license=None,
)


def main() -> None:
    """Convert, count, print, and write the result to --output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    seed = ZAYA[ROWS] / ZAYA[1]
    value: dict[str, Any] = {
        "command": "python benchmarks/zaya_lesson.py",
        "seed": {"rows": ROWS, "ratio": seed},
    }
    with tempfile.TemporaryDirectory() as made:
        checkpoint = random_zaya(Path(made) / "checkpoint")
        config = read_json(checkpoint / "config.json")
        value["config"] = {name: config[name] for name in SIZES}
        for routing in ("soft", "top-1"):
            artifact = converted(checkpoint, Path(made) / routing, routing)
            value[routing] = lesson(artifact, routing)
    print(f"\nthe ZAYA experiment, timed: {ROWS} rows cost {seed:.2f} times what one costs")
    if options.output is not None:
        write_json(options.output, value)


def random_zaya(folder: Path) -> Path:
    """A random checkpoint with the released model's sizes, scaled down."""
    import torch
    import transformers

    released = transformers.ZayaConfig()
    config = transformers.ZayaConfig(
        hidden_size=released.hidden_size // SCALE,
        head_dim=released.head_dim // SCALE,
        moe_intermediate_size=released.moe_intermediate_size // SCALE,
        router_hidden_size=released.router_hidden_size // SCALE,
        num_hidden_layers=LAYERS,
        vocab_size=released.vocab_size * LAYERS // released.num_hidden_layers // SCALE,
        max_position_embeddings=FACTS.context_length,
        # Large enough that routers select different experts for different tokens.
        initializer_range=0.1,
    )
    torch.manual_seed(0)
    model: Any = transformers.ZayaForCausalLM(config)
    with torch.no_grad():
        for vector in model.parameters():
            if vector.dim() == 1:
                # The converter leaves out scales of 1 and biases of 0, which a trained model lacks.
                vector.add_(torch.randn_like(vector) * 0.02)
        # Without this the logits barely depend on the input, and all experts are equally likely.
        model.model.embed_tokens.weight.mul_(10)
        for layer in model.model.layers:
            for name in ("fc1", "fc2", "out_proj"):
                getattr(layer.mlp.gate.router_mlp, name).weight.mul_(3)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


def converted(checkpoint: Path, folder: Path, routing: str) -> Artifact:
    """The converted model, in int8 as in the experiment."""
    name = f"random-zaya-{routing}"
    about = {"kind": "checkpoint", "from": name}
    source = Source(name, about, name, checkpoint, checkpoint / "tokenizer.json", None, FACTS)
    recipe = ConversionOptions(
        functions=(1, ROWS), slots=FACTS.context_length, routing=routing
    )
    return convert(source, folder, recipe, progress=QUIET)


def lesson(artifact: Artifact, routing: str) -> dict[str, Any]:
    """Work, experts per row, and the break-even of drafting."""
    text = np.random.default_rng(0).integers(0, artifact.vocab_size, TOKENS).tolist()
    one, four, *_ = calls = count(
        artifact, [text[:1], *(text[at : at + ROWS] for at in range(1, TOKENS, ROWS))]
    )
    has = np.concatenate([call.has for call in calls], axis=1)
    whole = {1: one.parts, ROWS: four.parts}
    work = Work(whole, {rows: only_chosen(parts, has, rows) for rows, parts in whole.items()})
    show(routing, work)
    sums = {rows: total(parts) for rows, parts in whole.items()}
    return {
        **as_dict(work),
        "macs_per_byte": {rows: done.macs / done.weight_bytes for rows, done in sums.items()},
        "experts": has.shape[2],
        "tokens": TOKENS,
        "experts_read": {rows: experts_read(has, rows) for rows in range(1, ROWS + 1)},
        "by_experts_read": [] if has.all() else [*by_experts_read(four.parts, has.shape[2])],
    }


def show(routing: str, work: Work) -> None:
    """Print the tables of `paceline plan`."""
    for title, head, rows in tables(work):
        print(f"\n{routing} routing: {title}")
        for first, *rest in (head, *rows):
            print(f"{first:<27}", *(f"{cell:>14}" for cell in rest))


def by_experts_read(parts: Parts, experts: int) -> Iterator[dict[str, Any]]:
    """Break-even of a memory-bound call of `ROWS` rows, by the experts per layer that it reads.

    A call of one row reads one expert. `parts` is the work of a call with all experts. The last
    number of experts is the expectation for rows that choose independently and uniformly.
    """
    expert = parts[EXPERTS].weight_bytes / experts
    rest = total(parts).weight_bytes - parts[EXPERTS].weight_bytes
    free = experts * (1 - (1 - 1 / experts) ** ROWS)
    for read in (*range(1, ROWS + 1), free):
        cost = CostTable({1: rest + expert, ROWS: rest + read * expert})
        pays = {"ratio": cost(ROWS) / cost(1), "break_even": break_even(cost, ROWS)}
        yield {"experts": read, **pays}


if __name__ == "__main__":
    main()
