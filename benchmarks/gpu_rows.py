"""Which numbers of rows in a call of llama.cpp give equal bits on a GPU, and what calls cost there.

    python benchmarks/random_gguf.py 0.6B Q8_0 random.gguf
    LLAMA_CPP_LIB_PATH=llama.cpp/build/bin python benchmarks/gpu_rows.py random.gguf --out rows.json

The library is one of your own, built for the GPU from the version of the installed xllamacpp. After
each number of keys the same 16 positions are run in calls of 1 to 16 and of 32 rows. Numbers of
rows are in a class if all logits of all 16 positions are equal bit for bit. Further:

- *repeats*: numbers of rows that gave other bits a second time;
- *mixed*: of each class, positions that differ where lengths in the class alternate, and up to
  half of a call's rows are rejected, as a drafter's are;
- *together*: rows of several sequences in a call against those of each sequence alone, in calls of
  as many rows per sequence, and of as many in all; and of the first one beside longer sequences.

Each result is added to the record as soon as it is measured, and a record that is there goes on:
where the library ends the process, the others are not lost.
"""

import argparse
import ctypes
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import groupby, repeat
from pathlib import Path
from typing import Any

import numpy as np

from paceline.engines.llamacpp.binding import ContextSettings, Offload
from paceline.engines.llamacpp.libraries import library_folder
from paceline.engines.llamacpp.llama_h import FLASH_ATTENTION, TYPES
from paceline.engines.llamacpp.native import NativeContext, NativeModel, NativeSequence, Rows
from paceline.engines.llamacpp.sequence import round_up_slots
from paceline.engines.llamacpp.upstream import Llama

KEYS = (100, 243, 1100, 2035, 4083, 8179)
"""Keys before the compared positions, often 13 less than a multiple of 256: the library pads keys
to it, and in runs of 2 to 12 and of 14 to 32 rows a call reaches over it."""
POSITIONS = 16
"""Compared positions."""
ROWS = (*range(1, 17), 32)
TIMED = (1, 2, 4, 8, 16)
CALLS = 20
"""Calls whose median is taken."""
CHUNK = 512
"""Rows of a prompt's calls."""
TOGETHER = ((2, 1), (2, 2), (2, 4), (4, 1), (4, 2), (8, 1), (8, 2), (8, 4))
"""Sequences, and rows of each in a call."""
MOST_TOGETHER = 2_000
"""Most keys before calls of several sequences, which each have a memory of their own."""
LONGER = 17
"""Keys that a sequence has more than the one before it."""
FURTHER = 400
"""Keys that the others of the first sequence get then, to see whether its bits change."""

Bits = tuple[int, ...]
"""A hash of each position's logits."""


class Device(Llama):
    """llama.cpp with layers, keys and values on a device."""

    def __init__(self, layers: int) -> None:
        """Load the library; `layers` go to the device, -1: all."""
        super().__init__(library_folder(self.name))
        self._layers = layers
        self.types, self.flash = ("f16", "f16"), True

    def model_params(self, offload: Offload | None) -> Any:
        """See `Binding.model_params`."""
        params = super().model_params(offload)
        params.devices, params.n_gpu_layers = None, self._layers  # all devices
        return params

    def context(self, model: int, settings: ContextSettings) -> int | None:
        """See `Binding.context`."""
        params = self.api.llama_context_default_params()
        params.n_ctx = settings.slots * settings.sequences
        params.n_batch = params.n_ubatch = settings.rows
        params.n_outputs_max = settings.outputs
        params.n_seq_max = settings.sequences
        params.n_threads = params.n_threads_batch = settings.threads
        params.flash_attn_type = FLASH_ATTENTION if self.flash else 0
        params.type_k, params.type_v = (TYPES[name] for name in self.types)
        pointer: int | None = self.api.llama_init_from_model(model, params)
        return pointer

    def names(self) -> list[str]:
        """Devices of the library, the processor among them."""
        get, describe = (
            getattr(self.library, f"ggml_backend_dev_{name}") for name in ("get", "description")
        )
        get.restype, get.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        describe.restype, describe.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
        return [describe(get(n)).decode() for n in range(self.library.ggml_backend_dev_count())]


def main() -> None:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="GGUF files")
    parser.add_argument("--out", required=True, type=Path, help="file of the record")
    parser.add_argument(
        "--caches", nargs="+", default=["f16:f16", "q8_0:f16"], metavar="K:V",
        help="types of keys and values; K:V:off is without flash attention",
    )  # fmt: skip
    parser.add_argument("--keys", nargs="+", type=int, default=KEYS)
    parser.add_argument("--layers", type=int, default=-1, help="on the device (all)")
    options = parser.parse_args()
    device = Device(options.layers)
    record: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "library": "llama.cpp, build 11549",
        "devices": device.names(),
        "commands": [],
        "results": [],
    }
    if options.out.exists():
        record = json.loads(options.out.read_text())
    record["commands"].append(shlex.join(sys.argv))
    for file in options.files:
        model = NativeModel(device, file)
        for cache in options.caches:
            for result in measure(device, model, cache, options.keys):
                record["results"].append({"file": file.stem, "cache": cache, **result})
                options.out.write_text(json.dumps(record) + "\n")
        model.close()


def measure(
    device: Device, model: NativeModel, cache: str, keys: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Results after each number of keys, with keys and values of the types in `cache`."""
    key_type, value_type, *off = cache.split(":")
    device.types, device.flash = (key_type, value_type), not off
    settings = ContextSettings(
        slots=round_up_slots(max(keys) + CHUNK),
        rows=CHUNK,
        threads=min(os.cpu_count() or 1, 8),
        outputs=32,
    )
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, model.vocab_size, settings.slots).tolist()
    place = model.context(settings._replace(sequences=1)).sequences[0]
    read(place, tokens[:CHUNK])  # kernels are loaded when they are first called
    place.truncate(0)
    with closing(place.context):
        for count in sorted(keys):
            start, kept = time.perf_counter(), place.length
            read(place, tokens[kept:count])
            seconds = time.perf_counter() - start
            yield {
                "keys": count,
                "prompt_tokens_per_s": round((count - kept) / seconds),
                **after(place, tokens),
            }
    several = max(sequences for sequences, _ in TOGETHER)
    for count in keys:
        if count <= MOST_TOGETHER:
            slots = round_up_slots(count + several * LONGER + FURTHER + 2 * POSITIONS)
            context = model.context(settings._replace(slots=slots, sequences=several))
            with closing(context):
                yield {"keys": count, "together": together(context, tokens, count)}


def read(place: NativeSequence, tokens: Sequence[int]) -> None:
    """Run a prompt's tokens; the last row has logits, so that the device is waited for."""
    for start in range(0, len(tokens), CHUNK):
        chunk = tokens[start : start + CHUNK]
        place.decode(chunk, slice(len(chunk) - 1, len(chunk)))


def after(place: NativeSequence, tokens: Sequence[int]) -> dict[str, Any]:
    """Classes and costs after the keys that are there."""
    bits = {rows: decoded(place, tokens, repeat(rows)) for rows in ROWS}
    again = {rows: decoded(place, tokens, repeat(rows)) for rows in ROWS}
    classes = grouped(bits)
    mixed = {}
    for rows in classes:
        if len(rows) > 1 and rows[0] < rows[1] <= POSITIONS:
            lengths = iter(np.random.default_rng(1).choice(rows, POSITIONS).tolist())
            other = decoded(place, tokens, lengths, rejects=True)
            mixed[name_of(rows)] = differing(other, bits[rows[0]])
    spans = groupby(
        range(POSITIONS), lambda at: grouped({rows: (row[at],) for rows, row in bits.items()})
    )
    return {
        "classes": [name_of(rows) for rows in classes],
        "by_position": {
            place.length + next(positions): [name_of(rows) for rows in kinds]
            for kinds, positions in spans
        },
        "repeats": [rows for rows in ROWS if bits[rows] != again[rows]],
        "mixed": mixed,
        "ms": {rows: milliseconds(dropped_call([place], tokens, rows)) for rows in TIMED},
    }


def decoded(
    place: NativeSequence,
    tokens: Sequence[int],
    lengths: Iterable[int],
    *,
    rejects: bool = False,
) -> Bits:
    """Bits of the next positions in calls of these lengths; with `rejects` some rows are wrong."""
    start = place.length
    bits: list[int] = []
    for rows in lengths:
        at = start + len(bits)
        good = rows - rows // 2 if rejects else rows
        call = [*tokens[at : at + good], *tokens[: rows - good]]
        bits += hashes(place.decode(call, slice(0, rows))[:good])
        place.truncate(at + good)
        if len(bits) >= POSITIONS:
            break
    place.truncate(start)
    return tuple(bits[:POSITIONS])


def together(context: NativeContext, tokens: Sequence[int], keys: int) -> list[dict[str, Any]]:
    """Positions of several sequences that differ from those of each alone."""
    for place in context.sequences:
        read(place, tokens[: keys + LONGER * place.number])
    results: list[dict[str, Any]] = []
    shared = []
    for count, rows in TOGETHER:
        places = context.sequences[:count]
        bits = shared_bits(places, tokens, rows)
        shared.append(bits[0])
        results.append(
            {
                "sequences": count,
                "rows": rows,
                "positions": count * POSITIONS,
                "differ": differing_alone(places, tokens, bits, rows),
                "differ_from_as_many_rows": differing_alone(places, tokens, bits, count * rows),
                "ms": milliseconds(dropped_call(places, tokens, rows)),
            }
        )
    for place in context.sequences[1:]:
        read(place, tokens[place.length :][:FURTHER])
    for result, before in zip(results, shared, strict=True):
        places = context.sequences[: result["sequences"]]
        beside = shared_bits(places, tokens, result["rows"])[0]
        result["first_differs_beside_longer"] = differing(before, beside)
    return results


def shared_bits(places: Sequence[NativeSequence], tokens: Sequence[int], rows: int) -> list[Bits]:
    """Bits of each sequence's next positions, in calls of all of them."""
    bits: list[Bits] = [()] * len(places)
    for _ in range(0, POSITIONS, rows):
        logits = call_together(places, tokens, rows)
        bits = [(*row, *hashes(new)) for row, new in zip(bits, logits, strict=True)]
    for place, row in zip(places, bits, strict=True):
        place.truncate(place.length - len(row))
    return bits


def differing_alone(
    places: Sequence[NativeSequence], tokens: Sequence[int], bits: Sequence[Bits], rows: int
) -> int:
    """Positions that differ where each sequence has calls of its own, of `rows` rows."""
    alone = [decoded(place, tokens, repeat(rows)) for place in places]
    return sum(map(differing, alone, bits))


def call_together(places: Sequence[NativeSequence], tokens: Sequence[int], rows: int) -> list[Any]:
    """Logits of each sequence's next rows, in one call."""
    return places[0].context.decode(
        [Rows(place, tokens[place.length :][:rows], slice(0, rows)) for place in places]
    )


def dropped_call(
    places: Sequence[NativeSequence], tokens: Sequence[int], rows: int
) -> Callable[[], None]:
    """A call of each sequence's next rows, which are dropped."""

    def call() -> None:
        call_together(places, tokens, rows)
        for place in places:
            place.truncate(place.length - rows)

    return call


def milliseconds(call: Callable[[], None]) -> float:
    """Median time of a call."""
    times = []
    for _ in range(CALLS):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return round(float(np.median(times)) * 1e3, 2)


def hashes(logits: Any) -> list[int]:
    """A hash of each row's bits."""
    return [hash(row.tobytes()) for row in logits]


def differing(bits: Bits, other: Bits) -> int:
    """Positions that differ."""
    return sum(map(int.__ne__, bits, other))


def grouped(bits: dict[int, Bits]) -> list[list[int]]:
    """Numbers of rows with equal bits."""
    classes: dict[Bits, list[int]] = {}
    for rows, values in bits.items():
        classes.setdefault(values, []).append(rows)
    return list(classes.values())


def name_of(rows: Sequence[int]) -> str:
    """Numbers of rows, such as '2-4, 7'."""
    parts: list[list[int]] = []
    for number in rows:
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(f"{part[0]}-{part[-1]}" if part[1:] else str(part[0]) for part in parts)


if __name__ == "__main__":
    main()
