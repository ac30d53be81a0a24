"""Row counts that a model's passes may have: a table, from the libraries' sources.

llama.cpp (ggml/src/ggml-cpu of build 11549) multiplies K and IQ types with another kernel for 8
rows or more, in mixtures per expert (tiled/tiled.cpp), and weights without groups with another one
for a single row (llamafile/sgemm.cpp). ik_llama.cpp 0.1.5 repacks weights for passes of 32 rows or
more, unless their packed copy runs. On a GPU, each small range of row counts has its own kernels
(benchmarks/README.md, "Rows on a GPU").

A model has the strictest limits of its tensors, its keys and its device. They are verified when it
opens (`rows_hold`); a rule that does not hold is replaced by one that relies on fewer kernels.
Nothing is searched.
"""

from collections.abc import Iterator
from math import gcd
from typing import NamedTuple

from paceline.engines.llamacpp.binding import MAX_OUTPUTS, Heads
from paceline.engines.llamacpp.native import NativeModel
from paceline.engines.llamacpp.weights import CONVOLUTIONS, FLOATS, TILED, kind_of
from paceline.engines.rows import RowRange, RowRules
from paceline.storage.gguf_file import GgufFile, Tensor

MAX_ROWS = 256

_TOGETHER_ROWS = 32
"""Maximum rows of an answer's pass, of several sequences; one has `MAX_OUTPUTS`."""

CONTEXTS, DEVICE_CONTEXTS = (40, 400, 608, 1072), (40, 1100, 4000)
"""Keys before the compared rows: below and above 256, where the libraries begin to drop masked
keys, and 512 and 1,024; on a device, whose passes end before a multiple of 256."""

_ONE = RowRange(1, 1)

UNPADDED = RowRules(RowRange(1, MAX_OUTPUTS), RowRange(1, MAX_ROWS))
"""Rules if `min_rows` is 1: a row's bits depend on its pass."""


class RowLimits(NamedTuple):
    """Row counts in one class, with some weights, keys or device."""

    decode: int = _TOGETHER_ROWS
    """Maximum rows of an answer's pass: with more, another kernel runs."""
    prompt: int = 2
    """Minimum rows of a prompt's pass: with fewer, the answer's kernel runs."""
    max_rows: int = MAX_ROWS
    single: bool = True
    """True if a single row's products are added in the same order as those of several."""
    min_rows: int = 2
    """Minimum rows of any pass, except a single one."""


_LLAMA = {
    **dict.fromkeys(FLOATS, RowLimits(single=False)),
    **dict.fromkeys(TILED, RowLimits(decode=7, prompt=8)),
}
"""Weight type -> limits in llama.cpp; other types have none."""

_IK, _IK_OTHERS = {"Q6_K": RowLimits(prompt=64)}, RowLimits(prompt=32)
"""Weight type -> limits in ik_llama.cpp without a packed copy, and those of other types."""

_IK_FOURS = {"Q4_1": RowLimits(max_rows=16), "Q5_1": RowLimits(max_rows=16)}
"""Limits of types that ik_llama.cpp repacks four groups at a time. It reads past the end of a row
unless it has a multiple of four groups: KL 0.7 at 576 inputs."""

_GPU = RowLimits(decode=4, prompt=128, max_rows=128, single=False, min_rows=3)
"""CUDA on an H200: {3, 4} is in a class with all weights and keys that were measured. A prompt has
two passes between multiples of 256 keys."""

_GPU_FEW_QUERIES = _GPU._replace(min_rows=2)
"""The same for up to two query heads per key head, and keys in F16."""

_SOFTWARE = RowLimits(decode=4, prompt=3, max_rows=4, single=False, min_rows=3)
"""Mesa's software device: each number of rows above is compiled in 10 to 50 s."""

_GROUP = 32
_EXPERTS = 3
"""Dimensions of a tensor of experts, which may get any number of a pass's rows."""

_FEW_QUERIES, _MANY_ROWS = 3, 8
"""Rows of queries that an ik_llama.cpp thread multiplies with keys in Q8_0 directly, and minimum
rows of a pass for which keys are packed again."""

_PADDED_KEYS, _STEP, KEY_RUN = 256, 128, 32
"""Keys of an ik_llama.cpp pass, of a softmax step, and of a piece are multiples of these."""


def table_rules(
    model: NativeModel, content: GgufFile, threads: int, length: int, *, shared: bool = False
) -> RowRules:
    """Return the rules of a model, from the table.

    A prompt that cannot have passes of its own size is read like an answer.

    Args:
        model: the model.
        content: its file's content.
        threads: threads of a pass.
        length: maximum slots of a sequence.
        shared: True if sequences share passes.
    """
    limits = [*_limits(model, content, threads)]
    decode = min(each.decode for each in limits)
    prompt = max(each.prompt for each in limits)
    max_rows = min(each.max_rows for each in limits)
    min_rows = max(each.min_rows for each in limits)
    answer = RowRange(min_rows, min(MAX_OUTPUTS, decode, max_rows))
    # No pass is padded past a multiple of `span`, unless padding counts like rows.
    padded = model.span and model.offload is None and prompt > min_rows
    single = all(each.single for each in limits) and any(
        all(may_be_single(model, threads, keys + row) for row in range(answer.max_rows))
        for keys in CONTEXTS[:2]
        if keys + answer.max_rows <= length
    )
    return RowRules(
        answer,
        answer if padded or prompt > max_rows else RowRange(prompt, max_rows),
        single=single,
        together=decode if shared else 1,
    )


def fewer_kernels(rules: RowRules) -> Iterator[RowRules]:
    """Yield rules and their fallbacks, in order, for use until rules hold.

    In the second to last, each row of an answer runs alone, as in plain decoding, and drafts
    gain nothing; in the last, also each row of a prompt: no pass has a second row that could
    affect a row's bits.
    """
    alone = rules._replace(together=1)
    padded = alone._replace(single=False)
    yield from dict.fromkeys((rules, alone, padded, padded._replace(decode=_ONE)))
    yield RowRules(_ONE, _ONE)


def may_be_single(model: NativeModel, threads: int, keys: int) -> bool:
    """Return whether attention of one row after `keys` keys adds in the order of several rows.

    In llama.cpp it does. ik_llama.cpp (`iqk_flash_attn_noalibi` in iqk_flash_attn.cpp) divides the
    keys of all heads among the threads, in pieces, if there are several query heads per key head.
    Sums have the usual order if a head is one piece:

        3 heads, 2 threads, 512 keys   3 * 512 / 2 = 768 keys per thread: a head is one piece
        3 heads, 2 threads, 288 keys   27 runs of 32 for 2 threads: pieces of 128, two cuts

    Keys are padded to 256; masked ones at the end are dropped if they are at least a quarter.
    The softmax then runs in steps of 128 keys, or of 64 or 32 if their number requires it.
    """
    heads = model.heads
    if model.binding.name != "ik_llama.cpp":
        return True
    if heads is None or heads.queries == 1:
        return heads is not None
    padded = -(-(keys + 1) // _PADDED_KEYS) * _PADDED_KEYS
    seen = -(-(keys + 1) // KEY_RUN) * KEY_RUN
    if padded > _PADDED_KEYS and seen <= 3 * padded // 4:
        padded = seen
    if padded % _STEP:
        return False
    if heads.keys == 1:
        return threads == 1
    shared = gcd(heads.keys, threads)
    runs, workers = heads.keys // shared * padded // KEY_RUN, threads // shared
    return runs % workers == 0 and heads.keys // threads >= 1


def _limits(model: NativeModel, content: GgufFile, threads: int) -> Iterator[RowLimits]:
    yield RowLimits()
    offload, is_ik = model.offload, model.binding.name == "ik_llama.cpp"
    if offload is None or not offload.is_whole:
        of_tensor = _ik_limits if is_ik else _llama_limits
        yield from (of_tensor(tensor, packed=model.packed) for tensor in content.tensors)
        if model.quantized and is_ik:
            yield ik_key_limits(model.heads, threads)
    if offload is not None and offload.device.is_software:
        yield _SOFTWARE
    elif offload is not None:
        is_few = model.heads is not None and model.heads.queries <= 2 and not model.quantized
        yield _GPU_FEW_QUERIES if is_few else _GPU


def _ik_limits(tensor: Tensor, *, packed: bool) -> RowLimits:
    kind = kind_of(tensor)
    if kind in _IK_FOURS and tensor.shape[-1] // _GROUP % 4:
        return _IK_FOURS[kind]
    return RowLimits() if packed else _IK.get(kind, _IK_OTHERS)


def _llama_limits(tensor: Tensor, *, packed: bool) -> RowLimits:
    kind, dimensions = kind_of(tensor), len(tensor.shape)
    if kind in FLOATS and (dimensions == 1 or tensor.name.endswith(CONVOLUTIONS)):
        return RowLimits()  # not multiplied as a matrix
    limits = _LLAMA.get(kind, RowLimits())
    is_tiled = kind in TILED and dimensions == _EXPERTS
    return limits._replace(max_rows=limits.decode) if is_tiled else limits


def ik_key_limits(heads: Heads | None, threads: int) -> RowLimits:
    """Return ik_llama.cpp's limits with keys in Q8_0.

    A thread multiplies four rows of a head with keys that are packed again, as for all rows of a
    pass of eight or more; those products add in another order. Threads that cannot have whole
    heads divide a head's rows; for a single row, they divide the key heads:

        9 heads, 2 threads    a thread has half of the rows: up to 6 are 3 and 3
        32 heads, 8 threads   a thread has all rows of 4 heads: up to 3

    See `iqk_flash_attn_noalibi` and `compute_helper_q`.
    """
    divided = threads // gcd(heads.keys * heads.queries, threads) if heads else 1
    return RowLimits(
        decode=min(_FEW_QUERIES * divided, _MANY_ROWS - 1),
        prompt=_MANY_ROWS,
        single=heads is not None and heads.queries <= _FEW_QUERIES,
    )
