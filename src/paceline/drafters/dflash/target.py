"""What a DFlash drafter shares with its target: the embeddings and the head.

They are taken from the target's own OpenVINO graph, as nodes: the weights stay where they are, in
the target's mapped file, and in its precision. A Core ML model has them as matrices of float16.
Of a target that MLX runs they are asked for where they are used, in `mlx_network`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from paceline.drafters.dflash.checkpoint import Array, Config
from paceline.errors import ModelError
from paceline.storage.coreml import EMBEDDINGS, HEAD
from paceline.storage.files import read_json
from paceline.storage.manifest import MANIFEST


class Sizes(Protocol):
    """A target's, which a drafter's have to be."""

    @property
    def layers(self) -> int:
        """How many it has."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of hidden states."""
        ...

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        ...


@dataclass(frozen=True)
class Target:
    """A target's graph as far as a drafter needs it."""

    path: Path
    model: Any
    """The graph as read; it must outlive what is built on its nodes. None without a graph."""
    embeddings: Any
    """An output of the graph: [vocab, d]."""
    head: Any
    """An output of the graph: [vocab, d]."""
    layers: int

    @property
    def vocab_size(self) -> int:
        """Rows of the head."""
        return int(self.head.partial_shape[0].get_length())

    @property
    def hidden_size(self) -> int:
        """Width of hidden states."""
        return int(self.head.partial_shape[1].get_length())


def read_target(path: Path) -> Target:
    """Find embeddings, head and the number of layers of a language model.

    Args:
        path: an OpenVINO graph, or the folder of a Core ML model.

    Raises:
        ModelError: it cannot be read, or is of a form that is not known here.
    """
    return _core_ml(path) if path.is_dir() else _openvino(path)


def _core_ml(folder: Path) -> Target:
    from openvino import opset13

    manifest = read_json(folder / MANIFEST)
    names = [EMBEDDINGS, HEAD if HEAD in manifest["files"] else EMBEDDINGS]
    try:
        matrices = [np.load(folder / name) for name in names]
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: its embeddings cannot be read: {error}") from error
    nodes = [opset13.convert(opset13.constant(matrix), "f32").output(0) for matrix in matrices]
    return Target(folder, None, nodes[0], nodes[1], manifest["layers"])


def _openvino(path: Path) -> Target:
    import openvino as ov

    try:
        model = ov.Core().read_model(path)
    except RuntimeError as error:
        raise ModelError(f"{path} cannot be read as an OpenVINO model: {error}") from error
    ops = model.get_ordered_ops()
    head = model.output("logits").node.input_value(0).get_node()
    while head.get_type_name() != "MatMul" and head.get_input_size():
        head = head.input_value(0).get_node()
    gathers = [
        node.input_value(0)
        for node in ops
        if node.get_type_name() == "Gather"
        and node.get_input_partial_shape(0).rank.get_length() == 2
        and node.get_input_partial_shape(0).is_static
        and node.get_output_partial_shape(0).rank.get_length() == 3
    ]
    layers = sum(node.get_type_name() == "ScaledDotProductAttention" for node in ops)
    if head.get_type_name() != "MatMul" or not gathers or not layers:
        raise ModelError(f"{path}: a drafter finds no embeddings, head or layers to share in it")
    weights = head.input_value(1)
    if weights.partial_shape.is_dynamic or weights.partial_shape != gathers[0].partial_shape:
        raise ModelError(
            f"{path}: the head is {weights.partial_shape} and the embeddings "
            f"{gathers[0].partial_shape}; a drafter needs both as [vocabulary, hidden]"
        )
    return Target(path, model, gathers[0], weights, layers)


def matrix(weight: Any, rows: npt.NDArray[np.int64] | None = None) -> Array:
    """The numbers of `Target.embeddings` or `Target.head`: all rows, or some; [rows, d]."""
    import openvino as ov
    from openvino import opset13

    if rows is not None:
        weight = opset13.gather(weight, opset13.constant(rows), opset13.constant(np.int64(0)))
    model = ov.Model([opset13.result(weight)], [], "weight")
    compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found: Array = compiled({})[0]
    return found


def check_pair(folder: Path, config: Config, target: Sizes) -> None:
    """Refuse a drafter that was made for another target.

    Raises:
        ModelError: naming every number that differs.
    """
    pairs = {
        "hidden size": (config.hidden_size, target.hidden_size),
        "number of target layers": (config.num_target_layers, target.layers),
        "vocabulary": (config.vocab_size, target.vocab_size),
    }
    faults = [
        f"its {name} is {its}, the target's {targets}"
        for name, (its, targets) in pairs.items()
        if its != targets
    ]
    if faults:
        raise ModelError(f"{folder} is a drafter for another target: {'; '.join(faults)}")
