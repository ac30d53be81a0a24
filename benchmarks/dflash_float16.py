"""What float16 costs a DFlash drafter: tokens a call, with each operation's result rounded.

    python benchmarks/dflash_float16.py DRAFTER TARGET QUESTIONS [--answers 40] [--tokens 16]
        [--artifact FOLDER]

DRAFTER is a folder in z-lab's form. Ours of SmolLM2 is in the history of this repository:

    git show 98b2dfd1:src/paceline/drafters/shipped/smollm2-135m/dflash/model.safetensors

and config.json beside it. TARGET is its model, as `paceline convert` takes it; QUESTIONS is a file
of lines with `turns`, as Spec-Bench has them: every n-th of the short ones is asked.

The target answers greedily with transformers in float32. A draft is right as far as it agrees with
that answer, so all numerics draft for the same text. `engine` flushes numbers that float16 holds as
subnormal, as the Neural Engine is said to. Workarounds are those of the Rust port of mirror-sd:
a norm's row is first divided by its largest value; the residual stream, and attention's scores,
are cap * tanh(x / cap). An artifact, of `paceline convert DRAFTER --to coreml`, drafts for the same
text in the rehearsal: its drafts are compared with those of float16 and a scaled norm.
"""

import argparse
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.models import QUIET, ChatTemplate, Tokenizer
from paceline_coreml.conversion.scratch import scratch
from paceline_coreml.conversion.source import open_source
from paceline_coreml.engine.drafter import OpenDrafter

CAPS = {"residual": 128.0, "scores": 64.0}
LONGEST = 400
"""Characters of a question."""
LEAST = 2.0**-14
"""The smallest normal float16."""


def flushed(x: Tensor) -> Tensor:
    half = x.half().float()
    return torch.where(half.abs() < LEAST, 0.0, half)


ROUNDINGS: dict[str, Callable[[Tensor], Tensor]] = {
    "float32": lambda x: x,
    "bfloat16": lambda x: x.bfloat16().float(),
    "float16": lambda x: x.half().float(),
    "engine": flushed,
}
NUMERICS = [
    ("float32", ()),
    ("bfloat16", ()),
    ("float16", ()),
    ("float16", ("norm",)),
    ("float16", ("residual",)),
    ("float16", ("scores",)),
    ("float16", ("norm", "residual", "scores")),
    ("engine", ("norm",)),
]


class Network:
    """A DFlash checkpoint, whose operations' results go through `rounded`."""

    def __init__(
        self,
        folder: Path,
        ends: Mapping[str, Tensor],
        rounding: str = "float32",
        workarounds: tuple[str, ...] = (),
    ) -> None:
        from safetensors.torch import load_file

        self.config = json.loads((folder / "config.json").read_text())
        self.rounded, self.workarounds = ROUNDINGS[rounding], workarounds
        tensors = load_file(folder / "model.safetensors")
        self.weights = {name: self.rounded(rows.float()) for name, rows in tensors.items()}
        self.ends = {name: self.rounded(rows) for name, rows in ends.items()}
        size, theta = self.config["head_dim"], self.config["rope_theta"]
        frequencies = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angles = torch.arange(4096, dtype=torch.float64)[:, None] * frequencies
        self.cos, self.sin = (
            self.rounded(table.float().repeat(1, 2)) for table in (angles.cos(), angles.sin())
        )

    def context(self, states: Tensor) -> list[tuple[Tensor, Tensor]]:
        """[n, taps * d] -> keys and values of each layer, [heads, n, head_dim]."""
        fused = self.norm(self.capped(self.linear(states, "fc"), "residual"), "hidden_norm")
        return [
            self.keys_values(fused, f"layers.{layer}.", torch.arange(len(states)))
            for layer in range(self.config["num_hidden_layers"])
        ]

    def drafts(self, context: list[tuple[Tensor, Tensor]], tokens: list[int], start: int) -> Tensor:
        """The drafts of blocks that begin with each of n tokens, the first at `start`, [n, drafts].

        A block sees the context before it.
        """
        r, size, count = self.rounded, self.config["head_dim"], len(tokens)
        rows, mask = self.config["block_size"], self.config["dflash_config"]["mask_token_id"]
        block = [[token, *[mask] * (rows - 1)] for token in tokens]
        x = self.ends["embeddings"][torch.tensor(block)]
        positions = start + torch.arange(count)[:, None] + torch.arange(rows)
        for layer, (keys, values) in enumerate(context):
            name = f"layers.{layer}."
            normed = self.norm(x, f"{name}input_layernorm")
            q = self.rotated(self.heads(normed, f"{name}self_attn.q_proj"), positions, f"{name}q")
            k, v = self.keys_values(normed, name, positions)
            groups = q.shape[1] // k.shape[1]
            k, v, old_k, old_v = (
                tensor.repeat_interleave(groups, -3) for tensor in (k, v, keys, values)
            )
            q = r(q * size**-0.5)
            before = self.capped(r(q @ old_k.transpose(-1, -2)), "scores")
            unseen = torch.arange(old_k.shape[1]) >= positions[:, :1]
            before = before.masked_fill(unseen[:, None, None], -torch.inf)
            within = self.capped(r(q @ k.transpose(-1, -2)), "scores")
            weights = r(torch.cat([before, within], -1).softmax(-1))
            parts = weights.split([before.shape[-1], rows], -1)
            mixed = r(parts[0] @ old_v + parts[1] @ v).transpose(1, 2).reshape(count, rows, -1)
            added = self.linear(mixed, f"{name}self_attn.o_proj")
            x = self.capped(r(x + added), "residual")
            normed = self.norm(x, f"{name}post_attention_layernorm")
            gate = self.linear(normed, f"{name}mlp.gate_proj")
            both = r(r(gate * r(gate.sigmoid())) * self.linear(normed, f"{name}mlp.up_proj"))
            x = self.capped(r(x + self.linear(both, f"{name}mlp.down_proj")), "residual")
        return r(self.norm(x[:, 1:], "norm") @ self.ends["head"].T).argmax(-1)

    def keys_values(self, x: Tensor, name: str, positions: Tensor) -> tuple[Tensor, Tensor]:
        keys = self.heads(x, f"{name}self_attn.k_proj")
        return self.rotated(keys, positions, f"{name}k"), self.heads(x, f"{name}self_attn.v_proj")

    def heads(self, x: Tensor, name: str) -> Tensor:
        """[..., rows, d] -> [..., heads, rows, head_dim]."""
        return self.linear(x, name).unflatten(-1, (-1, self.config["head_dim"])).transpose(-2, -3)

    def rotated(self, x: Tensor, positions: Tensor, name: str) -> Tensor:
        r = self.rounded
        x = self.norm(x, f"{name[:-1]}self_attn.{name[-1]}_norm")
        left, right = x.chunk(2, -1)
        cos, sin = (table[positions].unsqueeze(-3) for table in (self.cos, self.sin))
        return r(r(x * cos) + r(torch.cat([-right, left], -1) * sin))

    def linear(self, x: Tensor, name: str) -> Tensor:
        return self.rounded(x @ self.weights[f"{name}.weight"].T)

    def norm(self, x: Tensor, name: str) -> Tensor:
        r, eps = self.rounded, torch.tensor(self.config["rms_norm_eps"])
        if "norm" in self.workarounds:
            largest = x.abs().amax(-1, keepdim=True).clamp(min=2.0**-6)
            small = r(2.0**-6 / largest)
            x, eps = r(x / largest), r(r(r(eps * 2.0**12) * small) * small)
        mean = r(r(x * x).mean(-1, keepdim=True))
        root = r(torch.rsqrt(r(mean + r(eps))))
        return r(r(x * root) * self.weights[f"{name}.weight"])

    def capped(self, x: Tensor, name: str) -> Tensor:
        if name not in self.workarounds:
            return x
        return self.rounded(self.rounded(torch.tanh(self.rounded(x / CAPS[name]))) * CAPS[name])


class Answer(NamedTuple):
    """A target's text and its hidden states."""

    tokens: list[int]
    prompt: int
    """Tokens of the prompt."""
    states: Tensor
    """[n, taps * d]"""


def answers(target: Path, prompts: list[list[int]], count: int, taps: list[int]) -> Any:
    """The target's embeddings and head, and its greedy answers of at most `count` tokens."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    ends = {
        "embeddings": model.get_input_embeddings().weight.detach(),
        "head": model.get_output_embeddings().weight.detach(),
    }
    recorded = []
    for prompt in prompts:
        made = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=count,
            do_sample=False,
            output_hidden_states=True,
            return_dict_in_generate=True,
        )
        # Of each call a tensor for each layer, [1, rows, d].
        states = [torch.cat([call[tap + 1][0] for tap in taps], -1) for call in made.hidden_states]
        recorded.append(Answer(made.sequences[0].tolist(), len(prompt), torch.cat(states)))
    return ends, recorded


def calls_of(network: Network, answer: Answer) -> tuple[int, int]:
    """Tokens after an answer's first one, and calls of the target that they take."""
    context, first = network.context(network.rounded(answer.states)), answer.prompt
    drafted = network.drafts(context, answer.tokens[first:-1], first).tolist()
    at, calls = first, 0
    while at < len(answer.tokens) - 1:
        following = answer.tokens[at + 1 :]
        pairs = enumerate(zip(drafted[at - first], following, strict=False))
        right = next((n for n, (a, b) in pairs if a != b), len(drafted[0]))
        at += min(right + 1, len(following))
        calls += 1
    return len(answer.tokens) - 1 - first, calls


def equal_drafts(model: OpenDrafter, network: Network, answer: Answer) -> tuple[int, int]:
    """Drafts of an artifact that are the network's, and all of them."""
    context, first = network.context(network.rounded(answer.states)), answer.prompt
    expected = network.drafts(context, answer.tokens[first:-1], first).numpy()
    packages = model.open()
    known, equal = 0, 0
    for at, drafts in enumerate(expected, first):
        packages.inject(answer.states[known:at].numpy(), known)
        known = at
        logits, _ = packages.run([answer.tokens[at]], at, outputs=len(drafts) + 1)
        equal += int((logits[1:].argmax(-1) == drafts).sum())
    return equal, expected.size


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("drafter", type=Path)
    parser.add_argument("target")
    parser.add_argument("questions", type=Path)
    parser.add_argument("--answers", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--artifact", type=Path)
    options = parser.parse_args()
    lines = map(json.loads, options.questions.read_text().splitlines())
    questions = [line["turns"][0] for line in lines if len(line["turns"][0]) <= LONGEST]
    asked = questions[:: max(len(questions) // options.answers, 1)][: options.answers]
    taps = json.loads((options.drafter / "config.json").read_text())["dflash_config"]
    with scratch() as work:
        source = open_source(options.target, work, QUIET)
        facts = source.facts
        tokenizer = Tokenizer(
            source.tokenizer, bos_token_id=facts.bos_token_id, add_bos=facts.add_bos
        )
        template = ChatTemplate(
            source.template, bos_token=facts.bos_token, eos_token=facts.eos_token
        )
        prompts = []
        for question in asked:
            messages = [{"role": "user", "content": question}]
            prompts.append(tokenizer.encode(template.render(messages), special=True))
        ends, recorded = answers(
            source.checkpoint, prompts, options.tokens, taps["target_layer_ids"]
        )
    print(
        f"{len(recorded)} answers, {sum(len(a.tokens) - a.prompt for a in recorded)} tokens",
        flush=True,
    )
    for rounding, workarounds in NUMERICS:
        started = time.perf_counter()
        network = Network(options.drafter, ends, rounding, workarounds)
        counts = [calls_of(network, answer) for answer in recorded]
        tokens, calls = (sum(numbers) for numbers in zip(*counts, strict=True))
        seconds = time.perf_counter() - started
        name = " + ".join([rounding, *workarounds])
        print(f"{name:38} {tokens / calls:.3f} tokens a call ({seconds:.0f} s)", flush=True)
    if options.artifact:
        network = Network(options.drafter, ends, "float16", ("norm",))
        model = OpenDrafter(options.artifact)
        pairs = [equal_drafts(model, network, answer) for answer in recorded]
        equal, drafts = (sum(numbers) for numbers in zip(*pairs, strict=True))
        print(f"{options.artifact}: {equal} of {drafts} drafts are those of float16 + norm")


if __name__ == "__main__":
    main()
