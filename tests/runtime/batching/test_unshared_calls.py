"""An engine that runs the blocks of a step one after another: drafts delay no other answer."""

from collections.abc import Sequence
from contextlib import closing

from paceline.decoding.costs import CostTable
from paceline.decoding.types import Block
from paceline.engines.base import StepResult
from paceline.engines.kv_blocks import BlockTable
from paceline.models import ModelFiles
from paceline.options import Options
from paceline.runtime.batching.scheduler import Scheduler
from paceline.runtime.model import Model
from support.costs import give_costs
from support.scheduling import Submitted
from support.toy import ToyEngine

ALONE = CostTable({1: 1.0, 2: 1.1, 4: 1.5, 8: 2.5, 16: 4.5, 32: 8.5})
"""Made-up seconds by rows of a block."""

PROMPTS = [[at % 8 + 8 * number for at in range(30)] for number in range(8)]


class Unshared(ToyEngine):
    shares_calls = False

    def step(self, work: Sequence[tuple[BlockTable, Block]]) -> StepResult:
        seconds = sum(ALONE(len(block.tokens)) for _, block in work)
        return super().step(work)._replace(seconds=seconds)


def test_drafts_in_a_batch_are_as_many_as_alone_where_calls_are_not_shared(tiny_files: ModelFiles):
    model = Model(tiny_files, Unshared(vocab_size=320, context_length=192, cache_blocks=512))
    give_costs(model, ALONE)
    options: Options = {"max_tokens": 100, "drafter": "suffix", "ignore_eos": True}
    options |= {"temperature": 0.7, "seed": 3}
    alone = [model.generate(prompt, **options) for prompt in PROMPTS]
    with closing(Scheduler(model)) as scheduler:
        submitted = [Submitted(scheduler, prompt, **options) for prompt in PROMPTS]
        scheduler.start()
        batch = [request.result() for request in submitted]
    assert [result.token_ids for result in batch] == [result.token_ids for result in alone]
    drafted = sum(result.stats.drafted for result in alone)
    assert drafted > 50
    assert sum(result.stats.drafted for result in batch) > 0.7 * drafted
