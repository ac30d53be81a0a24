"""Work of a call of a mixture of experts by part, and from which acceptance on drafts pay.

    python benchmarks/zaya_lesson.py

A random ZAYA, its widths an eighth of the published ones, its layers 4 and its vocabulary as much
smaller, is converted to Core ML in int8 with the routing it was trained with (top-1) and with all
experts (soft). Multiply-accumulates (MACs) and bytes of weights are counted in the programs of one
row and of four; the experts that four rows of a text read, in transformers. Nothing is timed, and
no Neural Engine is needed.
"""

import argparse
import re
import tempfile
from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from paceline.decoding.costs import CostTable
from paceline.models import QUIET, Facts
from paceline_coreml.conversion.convert import convert
from paceline_coreml.conversion.source import Source
from paceline_coreml.lint.program import Program, first
from paceline_coreml.options import ConversionOptions
from paceline_coreml.rehearsal.program import read_package

SCALE, ROWS, SLOTS = 8, 4, 256
ATTENTION, ROUTER, EXPERTS, REST, HEAD = "attention", "router", "experts", "rest", "head"
PARTS = {
    HEAD: re.compile("(?:final|head)_"),
    ATTENTION: re.compile(r"layers_\d+_(?:attention|mix)_"),
    ROUTER: re.compile(r"layers_\d+_router_"),
    EXPERTS: re.compile(r"layers_\d+_(?:feed_forward_)?experts_"),
    REST: re.compile(r"layers_\d+_"),
}
"""Part -> how the names of its weights begin; the first that matches."""


def main() -> None:
    """Convert, count and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=241, help="of the text, for the experts")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        model = random_zaya(Path(work) / "zaya", options.layers)
        chosen = choices(model, options.tokens)
        read = {rows: experts_read(chosen, rows) for rows in (1, ROWS)}
        print(f"experts that {ROWS} rows read: {read[ROWS]:.2f} of {model.config.num_experts}")
        for routing in ("soft", "top-1"):
            folder = converted(Path(work), routing)
            macs, weights = {}, {}
            for rows in (1, ROWS):
                macs[rows], weights[rows] = count(folder, rows)
            show(f"{routing}: all experts", macs, weights)
        share = {rows: read[rows] / model.config.num_experts for rows in read}
        for rows in read:  # each row has one expert
            macs[rows][EXPERTS] //= model.config.num_experts
            weights[rows][EXPERTS] = round(weights[rows][EXPERTS] * share[rows])
        show("top-1: only experts that a row has", macs, weights)
        by_experts(weights[1], model.config.num_experts)


def by_experts(one: Counter[str], experts: int) -> None:
    """Print what four rows cost by the experts that they read, bound by bytes; last: uniform."""
    uniform = experts * (1 - (1 - 1 / experts) ** ROWS)
    for read in (*range(1, ROWS + 1), uniform):
        total = sum(one.values()) + (read - 1) * one[EXPERTS]
        pays = CostTable({1: float(sum(one.values())), ROWS: total}).break_even(ROWS)
        print(f"{read:.2f} experts: {total / sum(one.values()):.2f} of one row, p = {pays:.2f}")


def random_zaya(folder: Path, layers: int) -> Any:
    """A random model with the published sizes, scaled down, saved in `folder`."""
    import torch
    import transformers

    released = transformers.ZayaConfig()
    config = transformers.ZayaConfig(
        hidden_size=released.hidden_size // SCALE,
        head_dim=released.head_dim // SCALE,
        moe_intermediate_size=released.moe_intermediate_size // SCALE,
        router_hidden_size=released.router_hidden_size // SCALE,
        num_hidden_layers=layers,
        vocab_size=released.vocab_size * layers // released.num_hidden_layers // SCALE,
        max_position_embeddings=SLOTS,
        initializer_range=0.1,  # large enough that routers select different experts
    )
    torch.manual_seed(0)
    model: Any = transformers.ZayaForCausalLM(config).eval()
    with torch.no_grad():
        for vector in model.parameters():
            if vector.dim() == 1:  # the converter leaves out scales of 1 and biases of 0
                vector.add_(torch.randn_like(vector) * 0.02)
        # Else logits barely depend on the input, and all experts are equally likely.
        model.model.embed_tokens.weight.mul_(10)
        for layer in model.model.layers:
            for name in ("fc1", "fc2", "out_proj"):
                getattr(layer.mlp.gate.router_mlp, name).weight.mul_(3)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return model


def converted(work: Path, routing: str) -> Path:
    """Folder of the Core ML form, with functions of one row and of four."""
    checkpoint = work / "zaya"
    facts = Facts(SLOTS, (1,), None, False, None, None, None)
    about = {"kind": "checkpoint", "from": "random"}
    source = Source("zaya", about, "zaya", checkpoint, checkpoint / "tokenizer.json", None, facts)
    recipe = ConversionOptions(functions=(1, ROWS), slots=SLOTS, routing=routing)
    return convert(source, work / routing, recipe, progress=QUIET).folder


def count(folder: Path, rows: int) -> tuple[Counter[str], Counter[str]]:
    """MACs and bytes of weights of a call, by part."""
    macs, weights = Counter[str](), Counter[str]()
    for path in sorted(folder.glob("*.mlpackage")):
        package = read_package(path)
        program = Program(package, package.function(f"t{rows}"))
        parts, part = dict[str, str](), HEAD
        for op in program.ops:
            if op.type not in ("conv", "matmul"):
                continue
            out = prod(program.shape_of(op.outputs[0].name) or ())
            if op.type == "conv":
                weight = str(first(op, "weight"))
                # A projection that is merged with the scale after it has lost its name.
                parts[weight] = part = part_of(weight) or part
                macs[part] += out * prod((program.shape_of(weight) or ())[1:])
            else:  # the products of two computed values are attention's
                shape = program.shape_of(first(op, "x")) or ()
                macs[ATTENTION] += out * shape[-2 if program.numbers(op, "transpose_x") else -1]
        for op, constant in program.stored():
            if prod(constant.shape) > 1:
                name = op.outputs[0].name
                weights[parts.get(name) or part_of(name) or REST] += constant.value().nbytes
    return macs, weights


def part_of(name: str) -> str | None:
    """The part of a weight; None: its name has none."""
    return next((part for part, begins in PARTS.items() if begins.match(name)), None)


def choices(model: Any, tokens: int) -> Any:
    """Experts of random tokens, [layers, tokens]."""
    import torch

    chosen: list[Any] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, out: chosen.append(out[2].reshape(-1)))
        for layer in model.model.layers
    ]
    text = np.random.default_rng(0).integers(0, model.config.vocab_size, tokens)
    with torch.no_grad():
        model(torch.from_numpy(text[None]))
    for hook in hooks:
        hook.remove()
    return np.array([each.numpy() for each in chosen])


def experts_read(chosen: Any, rows: int) -> float:
    """Mean number of experts of a layer that `rows` consecutive rows have."""
    calls = np.lib.stride_tricks.sliding_window_view(chosen, rows, axis=1)
    return float(np.mean([len({*call}) for layer in calls for call in layer.tolist()]))


def show(title: str, macs: dict[int, Counter[str]], weights: dict[int, Counter[str]]) -> None:
    """Print shares of four rows' work by part, the ratio to one row, and the break-even."""
    print(f"\n{title}")
    for kind, work in (("MACs", macs), ("bytes", weights)):
        sums = {rows: sum(parts.values()) for rows, parts in work.items()}
        shares = ", ".join(f"{p} {100 * n / sums[ROWS]:.1f} %" for p, n in work[ROWS].items())
        cost = CostTable({rows: float(total) for rows, total in sums.items()})
        pays = cost.break_even(ROWS)
        never = "never" if pays is None else f"from p = {pays:.2f} on"
        ratio = sums[ROWS] / sums[1]
        print(f"{kind:5}  {shares}; {ROWS} rows over 1: {ratio:.2f}, drafts pay {never}")


if __name__ == "__main__":
    main()
