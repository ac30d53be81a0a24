"""Runs several sequences in one forward pass: matrix products over all rows, attention by sequence.

The model runs once on the rows of all sequences. Only its *mixers* read other rows: the modules
that get a cache, for attention, a convolution or a recurrence. A hook calls each of them once per
sequence, with that sequence's rows, cache and mask, as in a forward pass of that sequence alone:

    rows           a a a b b c c c c     sequences a, b, c
    norms, MLPs    one call of 9 rows
    mixers         3 rows after a's keys, 2 after b's, 4 after c's
    projections    9 rows: those of a mixer's input, and one whose output is its result

MLX is lazy, so a projection of a few rows that is replaced with one of all rows is never computed.

Works for any model family. Invariant: compared with a forward pass of one sequence, only the number
of rows differs, and only outside mixers and in these projections. `probe.py` measures which numbers
are bit-identical. Models that read their caches outside mixers cannot run like this.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
from mlx import nn
from mlx_lm.models.cache import CacheList

from paceline_mlx.caches import leaves
from paceline_mlx.hooks import ROWS, Args, Array, Call, Kwargs, install_hook, is_rows


class PerSequence:
    """A mixer's argument that differs per sequence: a cache, a mask, shared keys."""

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items


class Caches(PerSequence):
    """The caches of a layer, one per sequence, passed where the model expects one cache."""

    def __init__(self, items: Sequence[Any], counts: Sequence[int]) -> None:
        super().__init__(items)
        self._counts = counts

    def __getitem__(self, index: int) -> "Caches":
        """Return a child of each `CacheList`. Raises TypeError for other caches."""
        if not isinstance(self.items[0], CacheList):
            raise TypeError("the model read caches of several sequences outside a mixer")
        return Caches([item[index] for item in self.items], self._counts)

    def make_mask(self, _: int, *args: Any, **kwargs: Any) -> PerSequence | None:
        """Return each sequence's own mask; the model passes the total number of rows."""
        pairs = zip(self.items, self._counts, strict=True)
        masks = [cache.make_mask(rows, *args, **kwargs) for cache, rows in pairs]
        return None if all(mask is None for mask in masks) else PerSequence(masks)


class _Part(NamedTuple):
    """The rows of one sequence in the input of a mixer."""

    whole: Array
    rows: slice
    part: Array
    """Kept alive, because it is identified by its `id`."""


class _Projected(NamedTuple):
    """A projection of one sequence's rows, which may turn out to be a mixer's result."""

    call: Call
    projection: int
    """`id` of its module."""
    argument: Array
    output: Array


class Together:
    """The hooks of one model for forward passes of several sequences."""

    def __init__(self, model: Any, caches: Sequence[Any]) -> None:
        """Install hooks on projections inside mixers; `hook_mixers` completes this.

        `model` is mlx-lm's, without hooks. `caches` are empty ones, which this call uses up.
        """
        self._spans: Sequence[slice] = ()  # rows of each sequence in the running pass
        self._parts: dict[int, _Part] = {}  # inputs of the running mixer, by `id`
        self._wholes: dict[tuple[int, int], Array] = {}  # (projection, input) -> output of all rows
        self._projected: dict[int, _Projected] = {}  # by `id` of the output
        self.mixers = _mixers(model, caches)
        projections = {
            id(module): module
            for mixer in self.mixers
            for module in mixer.modules()
            if isinstance(module, nn.Linear | nn.QuantizedLinear)
        }
        for name, module in projections.items():
            install_hook(module, partial(self._projection, name))

    def hook_mixers(self) -> None:
        """Install hooks on the mixers themselves, around hooks that they already have."""
        for mixer in self.mixers:
            install_hook(mixer, self._mixer)

    @contextmanager
    def calling(
        self, caches: Sequence[Sequence[Any]], counts: Sequence[int]
    ) -> Iterator[list[Caches]]:
        """Yield the caches to pass to the model.

        `caches`: each sequence's caches by layer; `counts`: each sequence's rows in the pass.
        """
        stops = [sum(counts[: number + 1]) for number in range(len(counts))]
        self._spans = [slice(stop - rows, stop) for stop, rows in zip(stops, counts, strict=True)]
        try:
            yield [Caches(layer, counts) for layer in zip(*caches, strict=True)]
        finally:
            self._spans = ()

    def _mixer(self, call: Call, args: Args, kwargs: Kwargs) -> Any:
        if not any(isinstance(value, PerSequence) for value in (*args, *kwargs.values())):
            return call(*args, **kwargs)  # a pass of one sequence
        try:
            results = [
                call(
                    *(self._part(value, number) for value in args),
                    **{name: self._part(value, number) for name, value in kwargs.items()},
                )
                for number in range(len(self._spans))
            ]
            if not isinstance(results[0], tuple):
                return self._joined(results)
            # Some also return keys and values, for layers that share them.
            hidden, *others = zip(*results, strict=True)
            return (self._joined(hidden), *map(PerSequence, others))
        finally:
            self._parts, self._wholes, self._projected = {}, {}, {}

    def _part(self, value: Any, number: int) -> Any:
        """Return the share of a mixer's argument that belongs to sequence `number`."""
        if isinstance(value, PerSequence):
            return value.items[number]
        if not is_rows(value) or value.shape[ROWS] != self._spans[-1].stop:
            return value
        rows = self._spans[number]
        part = value[:, rows]
        self._parts[id(part)] = _Part(value, rows, part)
        return part

    def _projection(self, name: int, call: Call, args: Args, kwargs: Kwargs) -> Any:
        if not self._spans or len(args) != 1:
            return call(*args, **kwargs)
        (argument,) = args
        part = self._parts.get(id(argument))
        if part is None:
            output = call(argument)
            self._projected[id(output)] = _Projected(call, name, argument, output)
            return output
        key = name, id(part.whole)
        if key not in self._wholes:
            self._wholes[key] = call(part.whole)
        return self._wholes[key][:, part.rows]

    def _joined(self, results: Sequence[Array]) -> Array:
        """Join results to [1, total, d]; a final projection runs once, on all rows."""
        last = [self._projected[id(result)] for result in results if id(result) in self._projected]
        if len(last) < len(results) or len({projected.projection for projected in last}) > 1:
            return mx.concatenate(results, axis=ROWS)
        inputs = mx.concatenate([projected.argument for projected in last], axis=ROWS)
        return last[0].call(inputs)


def _mixers(model: Any, caches: Sequence[Any]) -> list[Any]:
    """Return the modules that use a cache themselves, and all others of their classes.

    Some layers have no cache, but share another's keys. Empty if the model fails on this input.
    """
    classes: set[type] = set()
    known = {id(cache) for cache in leaves(caches)}
    hooked = [(module, type(module)) for module in model.modules() if module.children()]
    running: list[tuple[type, set[int]]] = []  # class, and caches not passed to a module inside

    def watched(kind: type, call: Call, args: Args, kwargs: Kwargs) -> Any:
        passed = known & set(map(id, leaves([*args, *kwargs.values()])))
        for _, used in running:
            used.difference_update(passed)
        running.append((kind, passed))
        result = call(*args, **kwargs)
        if running.pop()[1]:
            classes.add(kind)
        return result

    for module, kind in hooked:
        install_hook(module, partial(watched, kind))
    try:
        model(mx.zeros([1, 2], mx.int32), cache=caches)  # never evaluated
    except Exception:  # of any type: the engine's first forward pass reports it
        classes = set()
    finally:
        for module, kind in hooked:
            module.__class__ = kind
    return [module for module, kind in hooked if kind in classes]
