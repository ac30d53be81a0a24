"""What a model continues to prompts, by its own template."""

from dataclasses import replace

import pytest

from paceline.errors import ModelError
from paceline.models import ModelFiles
from paceline_lab.learn.openings import FOLLOW_UP, FREE, Opening, follow_ups, mixed, openings

NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}<{{ m.role }}>{{ m.content | trim }}\n{% endfor %}"
)


@pytest.mark.parametrize("template", [None, NO_SYSTEM])
def test_openings_vary_the_start_of_the_users_turn(template: str | None, tiny_files: ModelFiles):
    files = tiny_files if template is None else replace(tiny_files, chat_template=template)
    user = "<|im_start|>user\n" if template is None else "<user>"
    made = openings(files)
    kinds = {opening.kind for opening in made}
    assert {FREE, "code", "arithmetic", "German", "Chinese", "data"} <= kinds
    for opening in made:
        assert user in opening.text
        assert opening.text.endswith(opening.first_words)
        assert opening.first_words == opening.first_words.rstrip(" ")
    assert sum(opening.kind == FREE for opening in made) == pytest.approx(len(made) / 3, abs=2)


def test_a_second_turn_is_opened_after_a_question_and_its_answer(tiny_files: ModelFiles):
    (opening,) = follow_ups(tiny_files, [("Why?", "Because.")])
    assert opening.kind == FOLLOW_UP
    assert [message["content"] for message in opening.before] == ["Why?", "Because."]
    assert opening.text.endswith("Because.<|im_end|>\n<|im_start|>user\n")


def test_second_turns_are_mixed_with_first_turns():
    first = [Opening(str(number)) for number in range(5)]
    second = [Opening("a"), Opening("b")]
    assert "".join(one.text for one in mixed(first, second, 3)) == "012a340b"
    assert mixed(first, [], 3) == first


def test_a_model_without_a_template_starts_texts(tiny_files: ModelFiles):
    made = openings(replace(tiny_files, chat_template=None))
    assert all(one.is_text and one.text == one.first_words and one.text for one in made)
    assert {FREE, "code", "Spanish"} <= {one.kind for one in made}


@pytest.mark.parametrize("template", ["nothing", "{{ messages[0].content }}"])
def test_a_model_without_an_opening_is_rejected_with_an_alternative(
    template: str | None, tiny_files: ModelFiles
):
    with pytest.raises(ModelError) as refusal:
        openings(replace(tiny_files, chat_template=template))
    assert tiny_files.name in str(refusal.value)
    assert "--prompts" in str(refusal.value)
