"""The one loop: blocks of streams into a call of the engine, rows of the result to each stream.

A single stream, several streams and the server's requests all go through `run_step`. Only
`bench simulate` has no engine, and drives `decoding.Generation` itself.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from paceline.decoding.types import Block, FinishReason, Step
from paceline.engines.base import Engine, StepResult

if TYPE_CHECKING:
    from paceline.runtime.stream import Stream


def run_step(
    engine: Engine,
    work: Sequence[tuple["Stream", Block]],
    observe: Callable[[StepResult], None] = lambda _: None,
) -> list[Step | Exception]:
    """Run a block of each stream in one call of the engine, and accept the rows of each.

    Every answer is made by this function: a single stream, several, and the server's.

    Args:
        engine: that of all the streams.
        work: streams, each with its next block.
        observe: called with the engine's result before rows are accepted.

    Returns:
        The step of each stream, in the order of `work`, or the error that accepting its rows
        raised: one stream's error is not the others'.

    Raises:
        CacheFull: there are no slots for the blocks; nothing was run.
    """
    result = engine.step([(stream.sequence, block) for stream, block in work])
    observe(result)
    found: list[Step | Exception] = []
    for place, (stream, _) in enumerate(work):
        try:
            found.append(stream.accept(result, place))
        except Exception as error:
            found.append(error)
    return found


def raised(step: Step | Exception) -> Step:
    """Return a step of `run_step`, or raise its error."""
    if isinstance(step, Exception):
        raise step
    return step


def blocks_that_fit(engine: Engine, streams: Sequence["Stream"]) -> list[tuple["Stream", Block]]:
    """The next block of every stream that has slots for one row or more, cut to what fits.

    All of them fit together, so their call does not raise CacheFull.
    """
    free, size = engine.free_slots, engine.block_size
    found = []
    for stream in streams:
        own = stream.sequence.unused
        if own + free < 1:
            continue
        block = stream.next_block(own + free)
        free -= max(-(-(len(block.tokens) - own) // size) * size, 0)
        found.append((stream, block))
    return found


def run_together(streams: Sequence["Stream"]) -> None:
    """Run streams of one model to their ends, all unfinished ones in each call.

    The whole time of a call counts for each of its streams.
    """
    going = [stream for stream in streams if not stream.finished]
    for _ in as_they_end(iter(going), at_once=len(going)):
        pass


def as_they_end(
    streams: Iterator["Stream"], at_once: int, watch: Callable[["Stream"], None] = lambda _: None
) -> Generator["Stream", None, None]:
    """Run streams of one model, `at_once` in each call; yield each when it has ended.

    A stream without a free slot waits until others have ended. If all wait, the newest one ends
    with `length`. The next of `streams` is taken only when a place is free, so that lazy streams
    open no sooner. `watch` is called with a stream after each of its steps, and may close it.
    """
    going: list[Stream] = []
    try:
        while True:
            going += islice(streams, at_once - len(going))
            if not going:
                return
            fitting = blocks_that_fit(going[0].engine, going)
            if fitting:
                for step in run_step(going[0].engine, fitting):
                    raised(step)
            else:
                going[-1].end(FinishReason.LENGTH)
            for stream, _ in fitting:
                watch(stream)
            ended = [stream for stream in going if stream.finished]
            going = [stream for stream in going if not stream.finished]
            yield from ended
    finally:
        for stream in going:
            stream.close()
