"""Which prompts are kept, which part of the data each is for, and the figures about them."""

import pytest

from paceline_lab.learn.variety import HELD_OUT, TRAINING, UNSEEN, Variety, part_of


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("Write a story about a fox who lives in a wood near the sea", False),
        ("write a STORY about a fox, who lives in a wood near the lake!", False),
        ("Write a story about three sailors on an island without any water", True),
        ("What is the capital of Norway?", True),
    ],
)
def test_a_near_duplicate_of_an_earlier_prompt_is_dropped(text: str, accepted: bool):
    variety = Variety()
    assert variety.accepts("Write a story about a fox who lives in a wood near the sea")
    assert variety.accepts(text) == accepted
    assert variety.dropped == ({} if accepted else {"near duplicate": 1})
    assert len(variety) == 1 + accepted


def test_near_duplicates_are_found_in_scripts_without_spaces():
    variety = Variety()
    assert variety.accepts("请写一个关于狐狸的短篇故事")
    assert not variety.accepts("请写一个关于狐狸的短篇故事吧")
    assert variety.accepts("如何在家里种番茄和草莓")


def test_prompts_that_share_eight_words_with_an_excluded_one_are_dropped():
    variety = Variety(["One two three four five six seven eight nine", "short question"])
    assert not variety.accepts("Say: two three four five six seven eight nine, please")
    assert variety.accepts("Say: two three four five six seven, please")
    assert not variety.accepts("Short question?")
    assert variety.dropped == {"excluded": 2}


def test_untrained_topics_are_detected_in_all_user_messages():
    assert part_of(["Name a soup.", "And another?"]) == UNSEEN[0]
    assert part_of(["Name a song.", "Which vitamin is in it?"]) == UNSEEN[1]


def test_one_in_twenty_prompts_is_held_out_with_its_second_turn():
    firsts = [f"Question number {number}" for number in range(2000)]
    parts = [part_of([first]) for first in firsts]
    assert {*parts} == {TRAINING, HELD_OUT}
    assert 60 < parts.count(HELD_OUT) < 140
    assert [part_of([first, "And then?"]) for first in firsts] == parts


def test_the_variety_figures_count_the_accepted_prompts():
    variety = Variety()
    prompts = {"What is the capital of Norway?": "free", "Что такое облако": "follow-up"}
    assert all(variety.accepts(text, kind) for text, kind in prompts.items())
    openings = {"free": 1, "follow-up": 1}
    assert variety.figures() == {"prompts": 2, "openings": openings, "dropped": {}}
