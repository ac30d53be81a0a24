"""The tensors of a family's GGUF file, each with the tensors of the checkpoint it is made of.

Invariant: every tensor of the checkpoint is used, or known to be of no use, and each has the shape
that the configuration asks for. This is checked before anything is read.
"""

import re
from collections.abc import Container, Iterator

from paceline.errors import ModelError
from paceline.models.checkpoints.model import Config, Experts, Family, Layer, Sizes
from paceline.models.checkpoints.tensors import (
    Form,
    Output,
    Shape,
    Shards,
    cut,
    mxfp4,
    pair_order,
    rearranged,
    stacked,
    whole,
)

_SHOWN = 3
"""Names of tensors in a message."""
_UNUSED = re.compile(
    r"rotary_emb\.inv_freq$|rotary_pos_emb|^model\.layers\.\d+\.attention\.masked|^mtp\."
)
"""`mtp.` predicts the tokens after the next, and is left out where GGUF has no place for it."""
_HEAD, _HEAD_LAYER = "mtp.fc.weight", "mtp.layers.0."
_HEAD_NAMES = {
    _HEAD: "nextn.eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "nextn.enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "nextn.hnorm.weight",
    "mtp.norm.weight": "nextn.shared_head_norm.weight",
}
"""Tensors around the layer of an MTP head -> in GGUF, inside a block after the last layer."""
_OTHER_MODALITIES = re.compile(r"vision|visual|audio|multi_modal|mm_|image|embedder")


def plain_name(name: str) -> str:
    """A tensor's name without what a model of several modalities puts before its text model's."""
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name.removeprefix("language_model.")


def outputs(config: Config, family: Family, sizes: Sizes, shards: Shards) -> list[Output]:
    """The tensors of the file, in its order.

    Raises ModelError for tensors that are missing, left over, or of another shape.
    """
    tensors = layout(config, family, sizes, shards.tensors)
    needed = {name: shape for output in tensors for name, shape in output.sources.items()}
    stored = shards.tensors
    _refuse(shards, "lacks", [name for name in needed if name not in stored])
    for name, shape in needed.items():
        if stored[name].shape != shape:
            raise ModelError(
                f"{stored[name].path}: tensor {name} has the shape {list(stored[name].shape)}; "
                f"expected {list(shape)}, from {config.path.name}"
            )
    left = [name for name in stored if name not in needed and not _is_unused(name, config, sizes)]
    _refuse(shards, f"has tensors that are unknown for {config.model_type}:", left)
    return tensors


def layout(config: Config, family: Family, sizes: Sizes, stored: Container[str]) -> list[Output]:
    """The tensors of the file, for a checkpoint with the tensors `stored`.

    Checkpoints differ in whether they have a head, and in the form of their experts.
    """
    return list(_Layout(config, family, sizes, stored).outputs())


def _is_unused(name: str, config: Config, sizes: Sizes) -> bool:
    """Whether a tensor has no part in the text model's answers."""
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    return (
        _UNUSED.search(name) is not None
        # The copy of tied embeddings, and layers that predict the tokens after the next.
        or name == "lm_head.weight"
        or (layer is not None and int(layer[1]) >= len(sizes.layers))
        or (config.has_other_modalities and _OTHER_MODALITIES.search(name) is not None)
    )


def _refuse(shards: Shards, fault: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        raise ModelError(f"{shards.folder} {fault} {', '.join(names[:_SHOWN])}{more}")


class _Layout:
    """Goes through a model's tensors, in the order of the file."""

    def __init__(
        self, config: Config, family: Family, sizes: Sizes, stored: Container[str]
    ) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

        arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == family.arch)
        self._names = get_tensor_name_map(arch, len(sizes.layers))
        self._config = config
        self._family = family
        self._sizes = sizes
        self._stored = stored

    def outputs(self) -> Iterator[Output]:
        """Every tensor but the factors of positions."""
        sizes = self._sizes
        table = (sizes.vocab, sizes.hidden)
        yield self._whole("model.embed_tokens.weight", table, Form.TABLE)
        if not self._is_tied():
            yield self._whole("lm_head.weight", table, Form.TABLE)
        yield self._norm(f"{self._family.last_norm}.weight", sizes.hidden)
        for index, layer in enumerate(sizes.layers):
            prefix = f"model.layers.{index}."
            for norm in self._family.norms:
                yield self._norm(f"{prefix}{norm}.weight", sizes.hidden)
            if layer.has_attention:
                yield from self._attention(f"{prefix}self_attn.", layer)
            elif self._family.recurrent is not None:
                yield from self._family.recurrent(self._config, prefix, self._target)
            if sizes.experts is not None and layer.has_experts:
                yield from self._mixture(prefix, sizes.experts)
            else:
                yield from self._feed_forward(prefix + self._family.feed_forward[0], layer.ff)
        if self._family.extra is not None:
            yield from self._family.extra(self._config, self._whole)
        if self._family.has_mtp and _HEAD in self._stored:
            yield from self._mtp_head()

    def _mtp_head(self) -> Iterator[Output]:
        """One layer like those with full attention, and what joins it to the model."""
        hidden = self._sizes.hidden
        yield self._whole(_HEAD, (hidden, 2 * hidden))
        for name in _HEAD_NAMES:
            if name != _HEAD:
                yield self._norm(name, hidden)
        for norm in self._family.norms:
            yield self._norm(f"{_HEAD_LAYER}{norm}.weight", hidden)
        layer = self._sizes.layers[self._full_attention()]
        yield from self._attention(f"{_HEAD_LAYER}self_attn.", layer)
        yield from self._feed_forward(f"{_HEAD_LAYER}{self._family.feed_forward[0]}", layer.ff)

    def _full_attention(self) -> int:
        """Number of the first layer with full attention."""
        return next(i for i, layer in enumerate(self._sizes.layers) if layer.has_attention)

    def _is_tied(self) -> bool:
        """Whether the head is the embeddings: the default for a checkpoint without a head."""
        default = "lm_head.weight" not in self._stored
        return self._config.flag("tie_word_embeddings", default=default)

    def _attention(self, prefix: str, layer: Layer) -> Iterator[Output]:
        sizes, family = self._sizes, self._family
        rows = {
            "q": sizes.heads * layer.head_dim,
            "k": layer.kv_heads * layer.head_dim,
            "v": layer.kv_heads * layer.head_dim,
        }
        if family.fused:
            yield self._whole(f"{prefix}qkv_proj.weight", (sum(rows.values()), sizes.hidden))
        else:
            for part, size in rows.items():
                if f"{prefix}{part}_proj.weight" in self._stored or self._is_own(part, layer):
                    gated = part == "q" and family.gated
                    yield from self._projection(prefix, part, size * (1 + gated), layer.head_dim)
        output = f"{prefix}{family.output}"
        yield self._whole(f"{output}.weight", (sizes.hidden, rows["q"]))
        if sizes.attention_bias and "o" in family.biases:
            yield self._whole(f"{output}.bias", (sizes.hidden,), Form.PLAIN)
        if sizes.qk_norm and family.qk_norms is not None:
            widths = (rows["q"], rows["k"]) if family.qk_norm_whole else (layer.head_dim,) * 2
            for part, norm, width in zip("qk", family.qk_norms, widths, strict=True):
                if f"{prefix}{norm}.weight" in self._stored or self._is_own(part, layer):
                    yield self._norm(f"{prefix}{norm}.weight", width)
        if layer.kv_of is not None and f"{prefix}k_proj.weight" not in self._stored:
            yield from self._stand_ins(prefix, layer.kv_of, layer)
        if family.has_sinks:
            yield self._whole(f"{prefix}sinks", (sizes.heads,), Form.PLAIN)

    def _is_own(self, part: str, layer: Layer) -> bool:
        """Whether the layer must have a projection of its own for q, k or v."""
        return part == "q" or (layer.kv_of is None and not (part == "v" and layer.v_is_k))

    def _stand_ins(self, prefix: str, index: int, layer: Layer) -> Iterator[Output]:
        """The k of layer `index`, for one that has none: readers ask for it, and drop its result.

        Published checkpoints have such a k for each layer. A v that is not there is k, to readers.
        """
        source, norms = f"model.layers.{index}.self_attn.", self._family.qk_norms
        rows = (layer.kv_heads * layer.head_dim, self._sizes.hidden)
        name = "k_proj.weight"
        yield whole(self._target(prefix + name), source + name, rows, Form.MATRIX)
        if norms is not None:
            name = f"{norms[1]}.weight"
            yield whole(self._target(prefix + name), source + name, (layer.head_dim,), Form.PLAIN)

    def _projection(self, prefix: str, part: str, rows: int, head_dim: int) -> Iterator[Output]:
        """q, k or v, with its bias."""
        pairs = self._family.rope_pairs and part != "v"
        order = pair_order(rows // head_dim, head_dim) if pairs else None
        name = f"{prefix}{part}_proj"
        shape = (rows, self._sizes.hidden)
        yield whole(
            self._target(f"{name}.weight"), f"{name}.weight", shape, Form.MATRIX, order=order
        )
        if self._sizes.attention_bias and part in self._family.biases:
            bias = f"{name}.bias"
            yield whole(self._target(bias), bias, (rows,), Form.PLAIN, order=order)

    def _feed_forward(self, prefix: str, ff: int) -> Iterator[Output]:
        hidden = self._sizes.hidden
        _, gate, up, down = self._family.feed_forward
        if self._family.fused:
            yield self._whole(f"{prefix}gate_up_proj.weight", (2 * ff, hidden))
        else:
            for name in (gate, up):
                yield self._whole(f"{prefix}{name}.weight", (ff, hidden))
        yield self._whole(f"{prefix}{down}.weight", (hidden, ff))

    def _mixture(self, layer: str, experts: Experts) -> Iterator[Output]:
        """The router and the experts, in any of the forms in which checkpoints have them."""
        router = f"{layer}{experts.router}"
        yield self._whole(f"{router}.weight", (experts.count, self._sizes.hidden), Form.PLAIN)
        if experts.score_bias is not None:
            name = self._target(f"{layer}mlp.gate.e_score_correction.bias")
            yield whole(name, layer + experts.score_bias, (experts.count,), Form.PLAIN)
        prefix = f"{layer}{self._family.feed_forward[0]}experts."
        if experts.interleaved:
            yield self._whole(f"{router}.bias", (experts.count,), Form.PLAIN)
            yield from self._alternating(prefix, experts)
        elif f"{prefix}gate_up_proj" in self._stored:
            yield from self._halves(prefix, experts)
        else:
            yield from self._single(prefix, experts)
        if experts.shared_ff:
            yield from self._feed_forward(layer + experts.shared, experts.shared_ff)
        if experts.shared_gate is not None:
            source, hidden = f"{layer}{experts.shared_gate}.weight", self._sizes.hidden
            shapes = (1, hidden), (hidden,)
            yield rearranged(self._target(source), source, shapes, lambda values: values[0])

    def _single(self, prefix: str, experts: Experts) -> Iterator[Output]:
        """Experts as matrices of their own, as on the hub."""
        names = self._family.feed_forward[1:]
        for (part, shape), matrix in zip(self._expert_shapes(experts).items(), names, strict=True):
            sources = [f"{prefix}{i}.{matrix}.weight" for i in range(experts.count)]
            yield stacked(self._target(f"{prefix}{part}_proj.weight"), sources, shape, Form.MATRIX)

    def _halves(self, prefix: str, experts: Experts) -> Iterator[Output]:
        """Experts as [experts, out, in], gate above up, as in the models of transformers 5."""
        count, ff, hidden = experts.count, experts.ff, self._sizes.hidden
        for part, rows in (("gate", slice(0, ff)), ("up", slice(ff, None))):
            name, source = self._target(f"{prefix}{part}_proj.weight"), f"{prefix}gate_up_proj"
            yield cut(name, source, (count, 2 * ff, hidden), (count, ff, hidden), rows)
        name, shape = self._target(f"{prefix}down_proj.weight"), (count, hidden, ff)
        yield cut(name, f"{prefix}down_proj", shape, shape, slice(None))

    def _alternating(self, prefix: str, experts: Experts) -> Iterator[Output]:
        """gpt-oss: gate and up are every other row of one tensor; in MXFP4, or [in, out]."""
        count, ff, hidden = experts.count, experts.ff, self._sizes.hidden
        is_mxfp4 = f"{prefix}down_proj_blocks" in self._stored
        parts = {
            "gate": ("gate_up_proj", 2 * ff, slice(0, None, 2)),
            "up": ("gate_up_proj", 2 * ff, slice(1, None, 2)),
            "down": ("down_proj", hidden, slice(None)),
        }
        for part, (source, rows, chosen) in parts.items():
            name = self._target(f"{prefix}{part}_proj.weight")
            out, size = self._expert_shapes(experts)[part]
            shape, stored = (count, out, size), (count, size, rows)
            if is_mxfp4:
                yield mxfp4(name, f"{prefix}{source}", rows, shape, chosen)
            else:
                yield cut(name, f"{prefix}{source}", stored, shape, chosen, transposed=True)
            bias = name.removesuffix("weight") + "bias"
            biases = f"{prefix}{source}_bias"
            yield cut(bias, biases, (count, rows), (count, out), chosen, form=Form.PLAIN)

    def _expert_shapes(self, experts: Experts) -> dict[str, Shape]:
        into, out = (experts.ff, self._sizes.hidden), (self._sizes.hidden, experts.ff)
        return {"gate": into, "up": into, "down": out}

    def _norm(self, source: str, size: int) -> Output:
        shift = self._family.norm_shift
        return whole(self._target(source), source, (size,), Form.PLAIN, shift=shift)

    def _whole(self, source: str, shape: Shape, form: Form = Form.MATRIX) -> Output:
        return whole(self._target(source), source, shape, form)

    def _target(self, source: str) -> str:
        """Name in GGUF."""
        block = f"blk.{len(self._sizes.layers)}."
        if source in _HEAD_NAMES:
            return block + _HEAD_NAMES[source]
        if source.startswith(_HEAD_LAYER):  # as in a layer of the model
            like = f"model.layers.{self._full_attention()}."
            return block + self._target(like + source.removeprefix(_HEAD_LAYER)).split(".", 2)[2]
        name: str | None = self._names.get_name(source, try_suffixes=(".weight", ".bias"))
        if name is None:
            raise ValueError(f"gguf knows no name for {source} of {self._family.arch}")
        return name if name.endswith((".weight", ".bias")) else f"{name}.weight"
