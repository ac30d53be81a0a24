"""Short chat templates with the tags of public reasoning models, and a tiny reasoning model.

Each has what tells its form: marks, variables, and how the prompt ends. The rest is made up.
"""

from pathlib import Path

from gguf import TokenType

from support.tiny import END, START, vocabulary, write_tiny

_TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content.split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
)
_ASSISTANT = "{% if add_generation_prompt %}<|im_start|>assistant\n"

TEMPLATES = {
    "qwen3": (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.reasoning_content is string and loop.last %}"
        "<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
        "{{ m.content }}<|im_end|>\n{% endfor %}" + _ASSISTANT + "{% if enable_thinking is defined "
        "and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
    ),
    "deepseek-r1": _TURNS + _ASSISTANT + "<think>\n{% endif %}",
    "smollm3": (
        "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
        "{% if enable_thinking %}{% set mode = '/think' %}{% else %}{% set mode = '/no_think' %}"
        "{% endif %}<|im_start|>system\n{{ mode }}<|im_end|>\n"
        + _TURNS
        + _ASSISTANT
        + "{% if not enable_thinking %}<think>\n\n</think>\n{% endif %}{% endif %}"
    ),
    "granite-3.2": (
        "{% if thinking %}Write your thoughts after 'Here is my thought process:' and your "
        "response after 'Here is my response:'.\n{% endif %}"
        "{% for m in messages %}{{ m.role }} {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    ),
    "granite-3.3": (
        "{% if thinking %}Write your thoughts between <think></think> and your response between "
        "<response></response>.\n{% endif %}" + _TURNS + _ASSISTANT + "{% endif %}"
    ),
    "magistral": (
        "<s>Draft your thinking first, as [THINK]thoughts[/THINK], then answer.\n"
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    ),
    "gemma4": (
        "{% if enable_thinking is defined and enable_thinking %}<|think|>{% endif %}"
        "{% for m in messages %}<|turn>{{ m.role }}\n{{ m.content }}<turn|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|turn>model\n"
        "{% if not enable_thinking | default(false) %}<|channel>thought\n<channel|>{% endif %}"
        "{% endif %}"
    ),
    "seed-oss": (
        "{% set think = '<seed:think>' %}{% set end = '</seed:think>' %}"
        "{% if not thinking_budget is defined %}{% set thinking_budget = -1 %}{% endif %}"
        "{% for m in messages %}{{ m.role }}\n{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}assistant\n"
        "{% if thinking_budget == 0 %}{{ think }}<seed:cot_budget_reflect>{% endif %}{% endif %}"
    ),
}

OPEN, CLOSE = 318, 319
"""Token ids of the thinking tiny model's marks; decoding leaves both out."""


def write_thinking(path: Path, template: str) -> Path:
    """The tiny model with a template of its own, and tokens for `<think>` and `</think>`."""
    tokens, types, _ = vocabulary()
    for token, mark in ((OPEN, "<think>"), (CLOSE, "</think>")):
        assert tokens[token].startswith("<unused")
        tokens[token], types[token] = mark, int(TokenType.CONTROL)
    assert START in template
    assert END in template
    fields = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.chat_template": template,
    }
    return write_tiny(path, fields=fields)
