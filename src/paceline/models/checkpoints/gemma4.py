"""Gemma 4 (text): sizes that differ between layers, shared keys and values, inputs per layer.

Layers with full attention have larger heads, of which a part is rotated ("proportional"). The last
layers attend to the keys and values of earlier ones. Small models look up, for each token, a vector
per layer beside the embedding.
"""

from collections.abc import Iterator

from paceline.models.checkpoints.model import Config, Layer, MakeOutput, Value
from paceline.models.checkpoints.tensors import Form, Output

DEFAULTS = {
    **{"head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": True, "sliding_window": 512},
    **{"vocab_size": 262144, "hidden_size_per_layer_input": 256, "num_kv_shared_layers": 0},
    "rope_parameters": {
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25},
        "sliding_attention": {},
    },
}
"""Of transformers' Gemma4TextConfig."""


def layers(config: Config, plain: list[Layer]) -> list[Layer]:
    """Sizes of each layer."""
    head_dim = _global_head_dim(config)
    k_is_v = config.flag("attention_k_eq_v", default=False)
    kv_heads = _of_full_attention(
        config, "num_key_value_heads", "num_global_key_value_heads", plain[0].kv_heads
    )
    first_shared = len(plain) - _shared(config)
    wide = 2 if config.flag("use_double_wide_mlp", default=False) else 1
    last = {layer.has_window: index for index, layer in enumerate(plain[:first_shared])}
    sizes = []
    for index, layer in enumerate(plain):
        size = layer
        if index >= first_shared:
            if layer.has_window not in last:
                raise config.wrong("num_kv_shared_layers", _shared(config), "fewer layers")
            size = size._replace(kv_of=last[layer.has_window], ff=layer.ff * wide)
        if not layer.has_window:
            size = size._replace(head_dim=head_dim, v_is_k=k_is_v)
            if k_is_v:
                size = size._replace(kv_heads=kv_heads)
        sizes.append(size)
    return sizes


def metadata(config: Config) -> dict[str, Value]:
    """Keys of gemma4 alone."""
    full, sliding = _global_head_dim(config), config.integer("head_dim")
    cap = "final_logit_softcapping"
    return {
        **({cap: config.number(cap)} if config.get(cap) is not None else {}),
        "attention.shared_kv_layers": _shared(config),
        "embedding_length_per_layer_input": _per_layer(config),
        "attention.key_length": full,
        "attention.value_length": full,
        "attention.key_length_swa": sliding,
        "attention.value_length_swa": sliding,
        "rope.dimension_count": full,
        "rope.dimension_count_swa": sliding,
    }


def extra(config: Config, make: MakeOutput) -> Iterator[Output]:
    """A scale for each layer, and the inputs per layer."""
    count, hidden = config.integer("num_hidden_layers"), config.integer("hidden_size")
    size = _per_layer(config)
    if size:
        vocab = config.integer("vocab_size_per_layer_input", default=config.integer("vocab_size"))
        yield make("model.embed_tokens_per_layer.weight", (vocab, count * size), Form.TABLE)
        name = "model.per_layer_model_projection.weight"
        yield make(name, (count * size, hidden), Form.MATRIX)
        yield make("model.per_layer_projection_norm.weight", (size,), Form.PLAIN)
    for layer in range(count):
        prefix = f"model.layers.{layer}."
        yield make(f"{prefix}layer_scalar", (1,), Form.PLAIN)
        if size:
            yield make(f"{prefix}per_layer_input_gate.weight", (size, hidden), Form.MATRIX)
            yield make(f"{prefix}per_layer_projection.weight", (hidden, size), Form.MATRIX)
            yield make(f"{prefix}post_per_layer_input_norm.weight", (hidden,), Form.PLAIN)


def _global_head_dim(config: Config) -> int:
    return _of_full_attention(config, "head_dim", "global_head_dim", 512)


def _of_full_attention(config: Config, key: str, name: str, default: int) -> int:
    """A size of layers with full attention: by its `name`, or as transformers writes it back."""
    per_layer = config.get("per_layer_config")
    if isinstance(per_layer, dict):
        sizes = {str(layer.get(key)) for layer in per_layer.values() if isinstance(layer, dict)}
        if len(sizes) == 1 and (size := sizes.pop()).isdecimal():
            return int(size)
    return config.integer(name, default=default)


def _shared(config: Config) -> int:
    """Layers at the end without keys and values of their own."""
    return config.integer("num_kv_shared_layers", default=0, least=0)


def _per_layer(config: Config) -> int:
    """Size of the input per layer; 0: there is none."""
    return config.integer("hidden_size_per_layer_input", default=0, least=0)
