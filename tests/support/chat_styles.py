"""Chat templates in the styles of public models, and vocabularies that have their control tokens.

Made up here, with the marks and the habits of the published ones (Qwen3, Llama 3, Gemma 3, Gemma 4,
Mistral, Phi-4-mini): which texts are trimmed, joined, split or written as JSON.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.models.files import ModelFiles
from paceline.models.gguf.tokenizer import build_tokenizer
from paceline.models.manifest import TOKENIZER, Facts
from support.tiny import vocabulary
from support.tokenizer_lines import CONTROL, USER_DEFINED, sentence_piece
from support.tool_templates import TEMPLATES

_PARTS = (
    "{% macro said(c) %}{% if c is string %}{{ c }}{% else %}{% for part in c %}{{ part.text }}"
    "{% endfor %}{% endif %}{% endmacro %}"
)
STYLES: Mapping[str, str] = {
    "chatml": _PARTS
    + "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}"
    "{% endfor %}\n</tools><|im_end|>\n{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n"
    "{{ said(m.content) }}\n</tool_response><|im_end|>\n{% elif m.role == 'assistant' %}"
    "{% set c = said(m.content) %}{% set thought = m.reasoning_content or '' %}"
    "{% if '</think>' in c %}{% set thought = c.split('</think>')[0].split('<think>')[-1] %}"
    "{% set c = c.split('</think>')[-1].lstrip('\n') %}{% endif %}<|im_start|>assistant\n"
    "<think>\n{{ thought.strip('\n') }}\n</think>\n\n{{ c }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n'
    "</tool_call>{% endfor %}<|im_end|>\n"
    "{% else %}<|im_start|>{{ m.role }}\n{{ said(m.content) }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    "llama3": _PARTS
    + "<|begin_of_text|>{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    "{{ tools | tojson(indent=4) }}<|eot_id|>{% endif %}{% for m in messages %}<|start_header_id|>"
    "{{ 'ipython' if m.role == 'tool' else m.role }}<|end_header_id|>\n\n"
    "{{ said(m.content) | trim }}{% for call in m.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}'
    "{% endfor %}<|eot_id|>{% endfor %}{% if add_generation_prompt %}"
    "<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    "gemma3": _PARTS + "{{ bos_token }}{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
    "{% for m in messages %}<start_of_turn>{{ 'model' if m.role == 'assistant' else 'user' }}\n"
    "{{ said(m.content) | trim }}{% for call in m.tool_calls or [] %}{{ call | tojson }}"
    "{% endfor %}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}",
    "gemma4": TEMPLATES["gemma"].replace("{{ m.content }}", "{{ said(m.content) }}"),
    "mistral": "<s>" + TEMPLATES["mistral"].replace("{{ m.content }}", "{{ said(m.content) }}"),
    "phi": _PARTS
    + "{% for m in messages %}{% if m.role == 'system' and tools %}<|system|>{{ said(m.content) }}"
    "<|tool|>{{ tools | tojson }}<|/tool|><|end|>{% else %}{{ '<|' + m.role + '|>' }}"
    "{{ said(m.content) }}{% for call in m.tool_calls or [] %}<|tool_call|>"
    "{{ [call.function] | tojson }}<|/tool_call|>{% endfor %}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}",
}
STYLES = {name: text if "macro said" in text else _PARTS + text for name, text in STYLES.items()}

_MARK = re.compile(r"</?think>|</?tool_(?:call|response)>|<\|?[\w/\"]+\|?>|\[/?[A-Z_]{4,}\]|</?s>")
_NO_MARKS = ("<tools>", "</tools>")
_TEXT = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>")
"""Tokens that Qwen's vocabulary has not as control tokens but as added ones."""

KINDS = ("bytes", "sentencepiece")


def marks_of(style: str) -> list[str]:
    """Control tokens of a style."""
    named = {"phi": ["<|system|>", "<|user|>", "<|assistant|>"], "gemma3": ["<bos>"]}
    marks = {*_MARK.findall(STYLES[style]), *named.get(style, [])}
    return sorted(marks - {*_NO_MARKS})


def style_files(style: str, kind: str, folder: Path) -> ModelFiles:
    """Files of a model without weights: a tokenizer of this kind, and the template."""
    folder.mkdir(parents=True, exist_ok=True)
    marks = [
        (mark, USER_DEFINED if mark in (*_TEXT, "</think>") else CONTROL)
        for mark in marks_of(style)
    ]
    if kind == "bytes":
        tokens, types, merges = vocabulary()
        marks = [(mark, number) for mark, number in marks if mark not in tokens]
        fields: dict[str, Any] = {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens + [mark for mark, _ in marks],
            "tokenizer.ggml.token_type": types + [number for _, number in marks],
            "tokenizer.ggml.merges": merges,
        }
    else:
        words = "th the \u2581the is <t <to ool _r _re"
        marks = [(mark, number) for mark, number in marks if mark not in ("<s>", "</s>")]
        fields = sentence_piece(*marks, words=words)
    text = build_tokenizer(folder / TOKENIZER, fields)
    (folder / TOKENIZER).write_text(text, encoding="utf-8")
    bos = "<bos>" if style == "gemma3" else None
    facts = Facts(512, (), None, False, bos, None, None)
    return ModelFiles(style, folder, facts, "", STYLES[style], "made up")
