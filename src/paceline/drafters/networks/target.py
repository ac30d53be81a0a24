"""The embeddings and the head that a drafter with a network shares with its target.

From an OpenVINO graph they are nodes: the weights stay in the target's mapped file and in its
precision. A Core ML model has them as float16 matrices. A target in MLX provides them as functions
(`mlx.MlxTarget`).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from paceline.drafters.networks.tensors import Array
from paceline.errors import ModelError
from paceline.storage.coreml import EMBEDDINGS, HEAD
from paceline.storage.files import read_json
from paceline.storage.gguf import read_gguf_graph
from paceline.storage.gguf_file import read_gguf
from paceline.storage.manifest import MANIFEST
from paceline.storage.openvino import core


class TargetShape(Protocol):
    """Sizes of a target that its drafter must match."""

    @property
    def layers(self) -> int:
        """Number of layers."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of hidden states."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary."""
        ...


class TargetSizes(NamedTuple):
    """The sizes alone; a `TargetShape`."""

    layers: int
    hidden_size: int
    vocab_size: int


class DrafterShape(Protocol):
    """Sizes in a drafter's checkpoint."""

    @property
    def hidden_size(self) -> int:
        """Width of the target's hidden states."""
        ...

    @property
    def vocab_size(self) -> int:
        """Tokens in the target's vocabulary."""
        ...

    @property
    def num_target_layers(self) -> int | None:
        """Number of the target's layers; None: not in the checkpoint."""
        ...


@dataclass(frozen=True)
class TargetWeights:
    """Embeddings, head and sizes of a target."""

    path: Path
    model: Any
    """The OpenVINO graph, which must outlive graphs built on its nodes; None for Core ML."""
    embeddings: Any
    """[vocab, d], a graph output."""
    head: Any
    """[vocab, d], a graph output."""
    layers: int
    logits: Any = None
    """A graph output; None for Core ML."""

    @property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary."""
        return int(self.head.partial_shape[0].get_length())

    @property
    def hidden_size(self) -> int:
        """Width of hidden states."""
        return int(self.head.partial_shape[1].get_length())


def read_target(path: Path) -> TargetWeights:
    """Find embeddings, head and number of layers of a language model.

    Args:
        path: an OpenVINO graph, a GGUF file, or the folder of a Core ML model.

    Raises:
        ModelError: it cannot be read, or its form is not supported.
    """
    return _core_ml(path) if path.is_dir() else _openvino(path)


def layers_of(path: Path) -> int:
    """Number of layers of a language model, without those of an MTP head.

    Args:
        path: as for `read_target`, or the folder of a checkpoint.

    Raises:
        ModelError: it cannot be read, or its form is not supported.
    """
    if path.suffix == ".gguf":
        fields = read_gguf(path).fields
        family = fields.get("general.architecture")
        counts = (
            fields.get(f"{family}.{name}", 0) for name in ("block_count", "nextn_predict_layers")
        )
        return int(next(counts)) - int(next(counts))
    if (path / "config.json").is_file():
        config = read_json(path / "config.json")
        return int(config.get("text_config", config).get("num_hidden_layers", 0))
    return read_target(path).layers


def sizes_of(path: Path) -> TargetSizes:
    """Sizes of a language model; of a GGUF file by its metadata.

    Args:
        path: as for `read_target`.

    Raises:
        ModelError: it cannot be read, or lacks them.
    """
    if path.suffix != ".gguf":
        target = read_target(path)
        return TargetSizes(target.layers, target.hidden_size, target.vocab_size)
    file = read_gguf(path)
    embeddings = next(
        (tensor for tensor in file.tensors if tensor.name == "token_embd.weight"), None
    )
    if embeddings is None:
        raise ModelError(f"{path} has no tensor token_embd.weight; expected a language model")
    vocab_size, hidden_size = embeddings.shape
    return TargetSizes(layers_of(path), hidden_size, vocab_size)


def _core_ml(folder: Path) -> TargetWeights:
    from openvino import opset13

    manifest = read_json(folder / MANIFEST)
    names = [EMBEDDINGS, HEAD if HEAD in manifest["files"] else EMBEDDINGS]
    try:
        matrices = [np.load(folder / name) for name in names]
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder}: its embeddings cannot be read: {error}") from error
    nodes = [opset13.convert(opset13.constant(matrix), "f32").output(0) for matrix in matrices]
    return TargetWeights(folder, None, nodes[0], nodes[1], manifest["layers"])


def _openvino(path: Path) -> TargetWeights:
    model, logits = _graph(path)
    ops = model.get_ordered_ops()
    head = logits.node.input_value(0).get_node()
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
    if path.suffix == ".gguf":  # layers may have another kind of state than keys and values
        layers = layers_of(path)
    if head.get_type_name() != "MatMul" or not gathers or not layers:
        raise ModelError(f"{path} has no embeddings, head or layers that a drafter can share")
    weights = head.input_value(1)
    if weights.partial_shape.is_dynamic or weights.partial_shape != gathers[0].partial_shape:
        raise ModelError(
            f"{path}: the head is {weights.partial_shape} and the embeddings "
            f"{gathers[0].partial_shape}; a drafter needs both as [vocabulary, hidden]"
        )
    return TargetWeights(path, model, gathers[0], weights, layers, logits)


def _graph(path: Path) -> tuple[Any, Any]:
    """The graph, and its output of logits."""
    if path.suffix == ".gguf":
        model = read_gguf_graph(path)
        return model, model.outputs[0]
    try:
        model = core().read_model(path)
    except RuntimeError as error:
        raise ModelError(f"{path} cannot be read as an OpenVINO model: {error}") from error
    return model, model.output("logits")


def read_matrix(weight: Any, rows: npt.NDArray[np.int64] | None = None) -> Array:
    """Values of a target's embeddings or head, [n, d]: all rows, or those in `rows`."""
    import openvino as ov
    from openvino import opset13

    if rows is not None:
        weight = opset13.gather(weight, opset13.constant(rows), opset13.constant(np.int64(0)))
    model = ov.Model([opset13.result(weight)], [], "weight")
    compiled = core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    values: Array = compiled({})[0]
    return values


def check_pair(folder: Path, config: DrafterShape, target: TargetShape) -> None:
    """Check that a drafter fits this target.

    Raises ModelError: the message names every size that differs.
    """
    pairs = {
        "hidden size": (config.hidden_size, target.hidden_size),
        "number of target layers": (config.num_target_layers, target.layers),
        "vocabulary": (config.vocab_size, target.vocab_size),
    }
    faults = [
        f"its {name} is {its}, the target's {targets}"
        for name, (its, targets) in pairs.items()
        if its is not None and its != targets
    ]
    if faults:
        raise ModelError(f"{folder} is a drafter for another target: {'; '.join(faults)}")
