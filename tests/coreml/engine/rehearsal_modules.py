"""torch modules as they are converted: a transformer block with its cache, and how to save it.

Weights, norms and constants are numbers that fp16 holds, so that a package without rounding
computes what torch does.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import coremltools as ct
import coremltools.optimize.coreml as cto
import numpy as np
import torch

D, HEADS, KV_HEADS, HEAD, FF, SLOTS, ROWS = 64, 4, 2, 16, 96, 24, 4
EPSILON = 2**-10


class Block(torch.nn.Module):
    """[1, D, T, 1] in and out; keys and values are written to slots by a one-hot mask."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)

        def projection(inputs: int, outputs: int) -> torch.nn.Conv2d:
            return torch.nn.Conv2d(inputs, outputs, 1, bias=False)

        self.q = projection(D, HEADS * HEAD)
        self.k, self.v = projection(D, KV_HEADS * HEAD), projection(D, KV_HEADS * HEAD)
        self.o = projection(HEADS * HEAD, D)
        self.gate, self.up, self.down = projection(D, FF), projection(D, FF), projection(FF, D)
        self.before = torch.nn.Parameter(1 + torch.randn(1, D, 1, 1) / 8)
        self.after = torch.nn.Parameter(1 + torch.randn(1, D, 1, 1) / 8)
        for name in ("k_state", "v_state"):
            self.register_buffer(name, torch.zeros(1, KV_HEADS, SLOTS, HEAD))
        self.load_state_dict({name: one.half().float() for name, one in self.state_dict().items()})

    def forward(
        self,
        hidden: torch.Tensor,
        rope_cos: torch.Tensor,
        rope_sin: torch.Tensor,
        attn_mask: torch.Tensor,
        kv_write_mask: torch.Tensor,
    ) -> torch.Tensor:
        x = norm(hidden, self.before)
        q = turned(heads(self.q(x), HEADS), rope_cos, rope_sin)
        k = turned(heads(self.k(x), KV_HEADS), rope_cos, rope_sin)
        v = heads(self.v(x), KV_HEADS)
        kept = 1 - kv_write_mask.sum(-1, keepdim=True)
        self.k_state[:] = self.k_state * kept + kv_write_mask @ k
        self.v_state[:] = self.v_state * kept + kv_write_mask @ v
        keys = self.k_state.repeat_interleave(HEADS // KV_HEADS, 1)
        values = self.v_state.repeat_interleave(HEADS // KV_HEADS, 1)
        weights = torch.softmax(q @ keys.transpose(-1, -2) * HEAD**-0.5 + attn_mask, -1)
        attended = (weights @ values).permute(0, 1, 3, 2).reshape(1, HEADS * HEAD, -1, 1)
        hidden = hidden + self.o(attended)
        x = norm(hidden, self.after)
        return hidden + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x * D**-0.5
    return x * torch.rsqrt((x * x).sum(1, keepdim=True) + EPSILON) * weight


def heads(x: torch.Tensor, count: int) -> torch.Tensor:
    """[1, count * HEAD, T, 1] -> [1, count, T, HEAD]."""
    return x.reshape(1, count, HEAD, -1).permute(0, 1, 3, 2)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    left, right = x[..., : HEAD // 2], x[..., HEAD // 2 :]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


class Text(NamedTuple):
    """Rows for a block to run over, all of fp16's numbers."""

    hidden: np.ndarray
    cos: np.ndarray
    sin: np.ndarray

    def block(self, rows: Sequence[int], *, padding: int = 0) -> dict[str, np.ndarray]:
        """The inputs for consecutive rows, each in its own slot, and rows that mean nothing."""
        count = len(rows) + padding
        rng = np.random.default_rng(count)
        hidden, angles = (
            half(rng.normal(size=(1, D, count, 1))),
            half(rng.normal(size=(2, count, HEAD // 2))),
        )
        write = np.zeros((1, 1, SLOTS, count), np.float32)
        mask = np.full((1, 1, count, SLOTS), -1e4, np.float32)
        for place, row in enumerate(rows):
            hidden[:, :, place] = self.hidden[:, :, row]
            angles[:, place] = self.cos[row], self.sin[row]
            write[0, 0, row, place] = 1
            mask[0, 0, place, : row + 1] = 0
        return {
            "hidden": hidden,
            "rope_cos": angles[0],
            "rope_sin": angles[1],
            "attn_mask": mask,
            "kv_write_mask": write,
        }


def half(numbers: np.ndarray) -> np.ndarray:
    return numbers.astype(np.float16).astype(np.float32)


def text(seed: int = 0) -> Text:
    rng = np.random.default_rng(seed)
    angles = rng.uniform(0, 6, size=(SLOTS, HEAD // 2))
    return Text(half(rng.normal(size=(1, D, SLOTS, 1))), half(np.cos(angles)), half(np.sin(angles)))


def converted(block: Block, precision: str = "fp16") -> Any:
    """A coremltools model of a block with 1 to ROWS rows."""
    types = {"fp16": np.float16, "fp32": np.float32}
    example = text().block(range(ROWS))
    rows = ct.RangeDim(1, ROWS, default=1)
    flexible = {"hidden": 2, "rope_cos": 0, "rope_sin": 0, "attn_mask": 2, "kv_write_mask": 3}
    inputs = []
    for name, one in example.items():
        shape: list[Any] = list(one.shape)
        shape[flexible[name]] = rows
        inputs.append(ct.TensorType(name, tuple(shape), dtype=types[precision]))
    states = [
        ct.StateType(ct.TensorType(shape=(1, KV_HEADS, SLOTS, HEAD), dtype=np.float16), name=name)
        for name in ("k_state", "v_state")
    ]
    traced = torch.jit.trace(block.eval(), tuple(map(torch.from_numpy, example.values())))
    for state in (block.k_state, block.v_state):
        state.zero_()
    return ct.convert(
        traced,
        inputs=inputs,
        outputs=[ct.TensorType("out", dtype=types[precision])],
        states=states,
        minimum_deployment_target=ct.target.iOS18,
        compute_precision={"fp16": ct.precision.FLOAT16, "fp32": ct.precision.FLOAT32}[precision],
        skip_model_load=True,
    )


COMPRESSIONS = {
    "int8 per channel": lambda model: cto.linear_quantize_weights(
        model, only_convolutions(cto.OpLinearQuantizerConfig(weight_threshold=0))
    ),
    "int8 per tensor": lambda model: cto.linear_quantize_weights(
        model,
        only_convolutions(
            cto.OpLinearQuantizerConfig(granularity="per_tensor", weight_threshold=0)
        ),
    ),
    "a table of 4 bits for 16 channels": lambda model: cto.palettize_weights(
        model,
        only_convolutions(
            cto.OpPalettizerConfig(
                nbits=4, granularity="per_grouped_channel", group_size=16, weight_threshold=0
            )
        ),
    ),
}


def only_convolutions(config: Any) -> Any:
    return cto.OptimizationConfig(op_type_configs={"conv": config})


def with_weights_of(model: Any) -> Block:
    """The block with the weights of a model that coremltools decompressed."""
    block = Block()
    stored = cto.get_weights_metadata(model, weight_threshold=0)
    for layer in ("q", "k", "v", "o", "gate", "up", "down"):
        (found,) = (one.val for name, one in stored.items() if name.startswith(f"{layer}_weight"))
        getattr(block, layer).weight.data = torch.from_numpy(found.astype(np.float32))
    return block


def saved(model: Any, path: Path) -> Path:
    model.save(str(path))
    return path
