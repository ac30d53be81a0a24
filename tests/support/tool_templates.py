"""Short chat templates with the formats of public models that call tools, and a tiny model.

Made up here: how each describes tools, writes calls and takes results follows the published
templates (Qwen3, Qwen3-Coder, Llama 3.2, Mistral Small 3.1, Devstral, Gemma 4, FunctionGemma, LFM2,
gpt-oss); the rest is left away.
"""

import json
from pathlib import Path
from typing import Any

from gguf import TokenType

from paceline.tools.forms import FORMS, ToolForm
from support.tiny import vocabulary, write_tiny

_QWEN = (
    "{% if tools %}<|im_start|>system\n<tools>{% for tool in tools %}\n{{ tool | tojson }}"
    "{% endfor %}\n</tools>{{ hint }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "{% if m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n"
    "</tool_response><|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}CALLS"
    "<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\nTHINK{% endif %}"
)
_EACH = "{% for call in m.tool_calls or [] %}{% set f = call.function %}"
_LLAMA = "<|start_header_id|>{{ role }}<|end_header_id|>\n\n"
_GEMMA = (
    "{% macro value(v) %}{% if v is string %}QUOTE{{ v }}QUOTE{% elif v is mapping %}{{ '{' }}"
    "{% for k, each in v.items() %}{{ k }}:{{ value(each) }}{{ ',' if not loop.last }}"
    "{% endfor %}{{ '}' }}{% elif v is iterable %}[{% for each in v %}{{ value(each) }}"
    "{{ ',' if not loop.last }}{% endfor %}]{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
    "{% for tool in tools or [] %}declaration:{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content }}" + _EACH + "OPENcall:{{ f.name }}{{ value(f.arguments) }}CLOSE{% endfor %}"
    "RESULTS<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)

TEMPLATES = {
    "hermes": _QWEN.replace(
        "CALLS",
        _EACH + '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n'
        "</tool_call>{% endfor %}",
    ).replace("THINK", ""),
    "qwen-xml": _QWEN.replace(
        "CALLS",
        _EACH + "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments.items() %}"
        "<parameter={{ k }}>\n{{ v if v is string else v | tojson }}\n</parameter>\n{% endfor %}"
        "</function>\n</tool_call>{% endfor %}",
    ).replace("THINK", "<think>\n{% if enable_thinking is false %}\n</think>\n\n{% endif %}"),
    "llama": (
        "{% if tools %}" + _LLAMA.replace("{{ role }}", "system") + "Respond in the format "
        '{"name": function name, "parameters": dictionary}.{{ tools | tojson }}'
        "<|eot_id|>{% endif %}"
        "{% for m in messages %}{% set role = 'ipython' if m.role == 'tool' else m.role %}"
        + _LLAMA
        + "{% if m.tool_calls %}{% if m.tool_calls | length != 1 %}"
        "{{ raise_exception('only single tool-calls at once') }}{% endif %}"
        '{% set f = m.tool_calls[0].function %}{"name": "{{ f.name }}", "parameters": '
        "{{ f.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor %}"
        "{% if add_generation_prompt %}{% set role = 'assistant' %}" + _LLAMA + "{% endif %}"
    ),
    "mistral": (
        "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "{% for m in messages %}{% set id = m.tool_call_id or (m.tool_calls or [{}])[0].id %}"
        "{% if id and id | length != 9 %}{{ raise_exception('ids have a length of 9') }}{% endif %}"
        "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}"
        '[TOOL_RESULTS]{"content": {{ m.content }}, "call_id": "{{ id }}"}[/TOOL_RESULTS]'
        "{% elif m.tool_calls %}[TOOL_CALLS][" + _EACH + '{"name": "{{ f.name }}", "arguments": '
        "{{ f.arguments | tojson }}}{{ ', ' if not loop.last }}{% endfor %}]</s>"
        "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
    ),
    "gemma": (
        _GEMMA.replace("OPEN", "<|tool_call>")
        .replace("CLOSE", "<tool_call|>")
        .replace("QUOTE", '<|"|>')
        .replace(
            "RESULTS",
            "{% set last = 'tool' %}{% for r in m.tool_responses or [] %}"
            "<|tool_response>response:{{ r.name }}"
            "{value:{{ value(r.response) }}{{ '}' }}<tool_response|>{% endfor %}",
        )
    ),
    "function-gemma": (
        _GEMMA.replace("OPEN", "<start_function_call>")
        .replace("CLOSE", "<end_function_call>")
        .replace("QUOTE", "<escape>")
        .replace("RESULTS", "{% if m.role == 'tool' %}<end_function_response>{% endif %}")
    ),
    "lfm2": (
        "{% if tools %}<|im_start|>system\nList of tools: <|tool_list_start|>{{ tools | tojson }}"
        "<|tool_list_end|><|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "harmony": (
        "{% if tools %}<|start|>developer<|message|>namespace functions {{ tools | tojson }}<|end|>"
        "{% endif %}{% for m in messages %}{% if m.role == 'tool' %}<|start|>functions to=assistant"
        "<|channel|>commentary<|message|>{{ m.content }}<|end|>{% elif m.tool_calls %}"
        "{% if m.content and m.thinking %}{{ raise_exception('content or thinking') }}{% endif %}"
        "{% set f = m.tool_calls[0].function %}<|start|>assistant<|channel|>analysis<|message|>"
        "{{ m.thinking or m.content }}<|end|><|start|>assistant<|channel|>commentary "
        "to={{ 'functions.' + f.name }} <|constrain|>json<|message|>"
        "{{ f.arguments | tojson }}<|call|>"
        "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
    ),
}

_SIGNS = {"minicpm": "<![CDATA[", "granite": "JSON list of tools", "deepseek-fenced": "```json"}
_SIGNS |= {"glm": "</arg_key>\n", "nemotron": "<TOOLCALL>[", "apriel": "<tool_calls>["}
_SIGNS |= {"seed": "<function=", "deepseek-xml": "function_calls"}
"""Further signs of a form's templates, for recognition."""


def _published(form: ToolForm) -> str:
    """A template that writes calls by the description of their form.

    What the published templates write is in tests/tools/test_published_calls.py.
    """
    label = "''"
    if form.label is not None:
        label = f"{_text(form.label[0])} ~ '%0{form.id_length or 1}d' % loop.index0"
    arguments = "{{ f.arguments | tojson }}"
    if form.tags.open:
        text, other = (_text(form.tags.head(is_text=is_text)) for is_text in (True, False))
        arguments = (
            f"{{% for k, v in f.arguments.items() %}}{{{{ {_text(form.tags.open)} ~ k ~ "
            f"({text} ~ v if v is string else {other} ~ v | tojson) ~ "
            f"{_text(form.tags.close + form.tags.after)} }}}}{{% endfor %}}"
        )
    between = f"('' if loop.last else {_text(form.between or '')})"
    call = (
        f"{{{{ {_text(form.before)} ~ f.name ~ {label} ~ {_text(form.after)} }}}}{arguments}"
        f"{{{{ {_text(form.end)} ~ {between} }}}}{{% endfor %}}{{{{ {_text(form.close)} }}}}"
    )
    begin = f"{{% if m.tool_calls %}}{{{{ {_text(form.mark + form.lead)} }}}}"
    calls = f"{begin}{_EACH}{call}{{% endif %}}"
    return _SIGNS.get(form.name, "") + _QWEN.replace("THINK", "").replace("CALLS", calls)


def _text(text: str) -> str:
    """A string of Jinja."""
    return json.dumps(text, ensure_ascii=False)


TEMPLATES |= {form.name: _published(form) for form in FORMS.values() if form.name not in TEMPLATES}

_MARKS = (
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>"),
    *("[TOOL_CALLS]", "[ARGS]", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_call_start|>"),
    *("<|tool_call_end|>", "<start_function_call>", "<end_function_call>", "<escape>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|constrain|>", "<|call|>"),
    "<|return|>",
)
MARKS = tuple(dict.fromkeys((*_MARKS, *(mark for form in FORMS.values() for mark in form.tokens))))


def write_calling(path: Path) -> Path:
    """The tiny model with all marks as control tokens, and the template of Hermes."""
    tokens, types, merges = vocabulary()
    free = [place for place, kind in enumerate(types) if kind == int(TokenType.UNUSED)]
    last = free[0] - 2  # before them a user-defined token, and before that the merged ones
    more = len(MARKS) - len(free)
    merged = set(range(last - more + 1, last + 1))
    gone = {tokens[place] for place in merged}
    merges = [merge for merge in merges if not gone & {*merge.split(" "), merge.replace(" ", "")}]
    for place, mark in zip(sorted(merged | set(free)), MARKS, strict=True):
        tokens[place], types[place] = mark, int(TokenType.CONTROL)
    fields: dict[str, Any] = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
        "tokenizer.chat_template": TEMPLATES["hermes"],
    }
    return write_tiny(path, fields=fields)
