"""Many requests at once over HTTP: every answer is the one that its request gets alone.

Eight clients ask the real model for chats and completions in every way there is to ask, find
beginnings of their prompts in the cache or not, and go away now and then.
"""

import pytest

from paceline.runtime.model import Model
from support.load import Load, check_load, plain_answers

pytestmark = [pytest.mark.real_model, pytest.mark.slow]


@pytest.mark.parametrize(
    "load",
    [Load(60, 12, samplings=2), pytest.param(Load(1000, 48), marks=pytest.mark.soak)],
    ids=["short", "long"],
)
def test_every_answer_is_the_one_that_its_request_gets_alone(load: Load, real_model: Model):
    check_load(real_model, load, plain_answers(real_model, load))
