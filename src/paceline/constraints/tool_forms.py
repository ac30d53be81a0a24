"""The forms in which models write tool calls, and the choice of one by a chat template.

Facts are from the models' published templates and documentation. Invariant: a template of an
unknown form gets none, so that what the model writes remains text.
"""

import re
from dataclasses import replace

from paceline.constraints.call_form import Syntax, Tags, ToolForm


def _signs(*patterns: str) -> tuple[re.Pattern[str], ...]:
    return tuple(map(re.compile, patterns))


def _deepseek(*words: str) -> str:
    """A mark of DeepSeek, with its full-width bars and low blocks."""
    joined = "\u2581".join(words)
    return f"<\uff5c{joined}\uff5c>"


HERMES = ToolForm(
    "hermes",
    _signs(r"<tool_call>", r'"arguments\\?"'),
    mark="<tool_call>",
    lead="\n",
    before='{"name": "',
    after='", "arguments": ',
    end="}",
    close="\n</tool_call>",
    separator="\n",
    syntax=Syntax.JSON,
    tokens=("<tool_call>", "</tool_call>"),
)
"""Qwen 2.5 and 3, Hermes, SmolLM, Granite 4; also for templates that know no tools."""

QWEN_XML = ToolForm(
    "qwen-xml",
    _signs(r"<tool_call>", r"<function="),
    mark="<tool_call>",
    lead="\n",
    before="<function=",
    after=">\n",
    end="</function>",
    close="\n</tool_call>",
    separator="\n",
    syntax=Syntax.TAGS,
    tags=Tags("<parameter=", ">\n", "\n</parameter>"),
    tokens=("<tool_call>", "</tool_call>"),
)
"""Qwen3-Coder, Qwen 3.5, Nemotron 3 Nano, Step 3.5."""

LLAMA = ToolForm(
    "llama",
    _signs(r"<\|start_header_id\|>", r'"parameters\\?": '),
    mark="<|python_tag|>",
    lead="",
    before='{"name": "',
    after='", "parameters": ',
    end="}",
    close="",
    syntax=Syntax.JSON,
    bare=True,
    single=True,
    tokens=("<|python_tag|>",),
)
"""Llama 3.1 to 3.3. Calls of its built-in tools, which are Python code, remain text."""

MISTRAL = ToolForm(
    "mistral",
    _signs(r"\[TOOL_CALLS\]"),
    mark="[TOOL_CALLS]",
    lead="[",
    before='{"name": "',
    after='", "arguments": ',
    end="}",
    between=", ",
    close="]",
    syntax=Syntax.JSON,
    tokens=("[TOOL_CALLS]",),
    id_length=9,
)
"""Mistral's tokenizers up to version 7; their templates demand ids of 9 letters and digits."""

MISTRAL_ARGS = replace(
    MISTRAL,
    name="mistral-args",
    signs=_signs(r"\[TOOL_CALLS\]", r"\[ARGS\]"),
    lead="",
    before="",
    after="[ARGS]",
    optional=("[ARGS]",),
    end="",
    between=None,
    close="",
    tokens=("[TOOL_CALLS]", "[ARGS]"),
)
"""Mistral's tokenizers from version 13 on: Devstral, Ministral 3. Some have no `[ARGS]`."""

MISTRAL_IDS = replace(
    MISTRAL_ARGS,
    name="mistral-ids",
    signs=(*MISTRAL_ARGS.signs, re.compile(r"\[CALL_ID\]")),
    optional=(),
    label=("[CALL_ID]", "[a-zA-Z0-9]{9}"),
    tokens=("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"),
)
"""Mistral Small 3.2."""

GEMMA = ToolForm(
    "gemma",
    _signs(r"<\|tool_call>call:"),
    mark="<|tool_call>",
    lead="",
    before="call:",
    after="",
    end="",
    close="<tool_call|>",
    syntax=Syntax.BRACES,
    quote='<|"|>',
    tokens=("<|tool_call>", "<tool_call|>", '<|"|>'),
)
"""Gemma 4."""

FUNCTION_GEMMA = replace(
    GEMMA,
    name="function-gemma",
    signs=_signs(r"<start_function_call>call:"),
    mark="<start_function_call>",
    close="<end_function_call>",
    quote="<escape>",
    tokens=("<start_function_call>", "<end_function_call>", "<escape>"),
)

LFM2 = ToolForm(
    "lfm2",
    _signs(r"<\|tool_(call|list)_start\|>|List of tools: "),
    mark="<|tool_call_start|>",
    lead="[",
    before="",
    after="(",
    end=")",
    between=", ",
    close="]<|tool_call_end|>",
    syntax=Syntax.PYTHON,
    tokens=("<|tool_call_start|>", "<|tool_call_end|>"),
)

HARMONY = ToolForm(
    "harmony",
    _signs(r"<\|channel\|>", r" to=", r"functions\."),
    mark="<|channel|>",
    lead="",
    before="commentary to=functions.",
    after=" <|constrain|>json<|message|>",
    optional=("<|constrain|>", "json"),
    end="",
    close="<|call|>",
    separator="<|start|>assistant",
    syntax=Syntax.JSON,
    channels=True,
    single=True,
    tokens=("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|call|>"),
)
"""gpt-oss. `decoding/reasoning.py` brings the head of a message into this order. A call ends an
answer, because `<|call|>` is a stop token."""

SEED = replace(
    QWEN_XML,
    name="seed",
    signs=_signs(r"<seed:tool_call>", r"<function="),
    mark="<seed:tool_call>",
    close="\n</seed:tool_call>",
    tags=Tags("<parameter=", ">", "</parameter>"),
    tokens=("<seed:tool_call>", "</seed:tool_call>"),
)
"""Seed-OSS."""

GLM = replace(
    QWEN_XML,
    name="glm",
    signs=_signs(r"<tool_call>", r"</arg_key>(\n|\\n)"),
    lead="",
    before="",
    after="\n",
    end="",
    close="</tool_call>",
    tags=Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
    tokens=(*QWEN_XML.tokens, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
"""GLM 4.5 and 4.6, Laguna XS.2."""

GLM_COMPACT = replace(
    GLM,
    name="glm-compact",
    signs=_signs(r"<tool_call>", r"</arg_key>"),
    after="",
    separator="",
    tags=Tags("<arg_key>", "</arg_key><arg_value>", "</arg_value>", ""),
)
"""GLM 4.7, Laguna 2.1."""

MINIMAX = replace(
    QWEN_XML,
    name="minimax",
    signs=_signs(r"<minimax:tool_call>", r"<invoke name="),
    mark="<minimax:tool_call>",
    before='<invoke name="',
    after='">\n',
    end="</invoke>",
    between="\n",
    close="\n</minimax:tool_call>",
    tags=Tags('<parameter name="', '">', "</parameter>"),
    tokens=("<minimax:tool_call>", "</minimax:tool_call>"),
)
"""MiniMax M2."""

MINICPM = replace(
    QWEN_XML,
    name="minicpm",
    signs=_signs(r"<function name=", r"<param name=", r"CDATA"),
    mark='<function name="',
    lead="",
    before="",
    after='">',
    end="",
    close="</function>",
    tags=Tags('<param name="', '">', "</param>", "", cdata=True),
    tokens=(),
)
"""MiniCPM 5. Its mark begins a call at once."""

DEEPSEEK_XML = replace(
    MINIMAX,
    name="deepseek-xml",
    signs=_signs("\uff5cDSML\uff5c", "function_calls"),
    mark="<\uff5cDSML\uff5cfunction_calls>",
    before='<\uff5cDSML\uff5cinvoke name="',
    end="</\uff5cDSML\uff5cinvoke>\n",
    between="",
    close="</\uff5cDSML\uff5cfunction_calls>",
    tags=Tags(
        '<\uff5cDSML\uff5cparameter name="', '">', "</\uff5cDSML\uff5cparameter>", flagged=True
    ),
    tokens=("\uff5cDSML\uff5c",),
)
"""DeepSeek V3.2."""

DEEPSEEK = ToolForm(
    "deepseek",
    _signs(_deepseek("tool", "calls", "begin"), _deepseek("tool", "sep")),
    mark=_deepseek("tool", "calls", "begin"),
    lead="",
    before=_deepseek("tool", "call", "begin"),
    after=_deepseek("tool", "sep"),
    end=_deepseek("tool", "call", "end"),
    between="",
    close=_deepseek("tool", "calls", "end"),
    syntax=Syntax.JSON,
    tokens=tuple(
        _deepseek("tool", *words)
        for words in (
            ("calls", "begin"),
            ("call", "begin"),
            ("sep",),
            ("call", "end"),
            ("calls", "end"),
        )
    ),
)
"""DeepSeek V3.1."""

DEEPSEEK_FENCED = replace(
    DEEPSEEK,
    name="deepseek-fenced",
    signs=(*DEEPSEEK.signs, re.compile("```json")),
    before=f"{DEEPSEEK.before}function{DEEPSEEK.after}",
    after="\n```json\n",
    end=f"\n```{DEEPSEEK.end}",
    between="\n",
)
"""DeepSeek V3 and R1."""

KIMI = ToolForm(
    "kimi",
    _signs(r"<\|tool_calls_section_begin\|>", r"<\|tool_call_argument_begin\|>"),
    mark="<|tool_calls_section_begin|>",
    lead="",
    before="<|tool_call_begin|>functions.",
    after="<|tool_call_argument_begin|>",
    end="<|tool_call_end|>",
    between="",
    close="<|tool_calls_section_end|>",
    syntax=Syntax.JSON,
    label=(":", "[0-9]{1,4}"),
    tokens=(
        *("<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"),
        *("<|tool_call_end|>", "<|tool_calls_section_end|>"),
    ),
)
"""Kimi K2."""

GRANITE = replace(
    MISTRAL,
    name="granite",
    signs=_signs(r"<\|tool_call\|>", r"JSON list of tools"),
    mark="<|tool_call|>",
    tokens=("<|tool_call|>",),
    id_length=None,
)
"""Granite 3.3."""

NEMOTRON = replace(
    GRANITE,
    name="nemotron",
    signs=_signs(r"<TOOLCALL>\["),
    mark="<TOOLCALL>",
    close="]</TOOLCALL>",
    tokens=("<TOOLCALL>", "</TOOLCALL>"),
)
"""Nemotron Nano 2."""

APERTUS = replace(
    NEMOTRON,
    name="apertus",
    signs=_signs(r"<\|tools_prefix\|>"),
    mark="<|tools_prefix|>",
    before='{"',
    after='": ',
    close="]<|tools_suffix|>",
    tokens=("<|tools_prefix|>", "<|tools_suffix|>"),
)

APRIEL = replace(
    NEMOTRON,
    name="apriel",
    signs=_signs(r"<tool_calls>\["),
    mark="<tool_calls>",
    close="]</tool_calls>",
    tokens=("<tool_calls>", "</tool_calls>"),
)
"""Apriel 1.5 and 1.6."""

FORMS = (
    *(
        HARMONY,
        GEMMA,
        FUNCTION_GEMMA,
        LFM2,
        MISTRAL_IDS,
        MISTRAL_ARGS,
        MISTRAL,
        GLM,
        GLM_COMPACT,
        MINIMAX,
        SEED,
    ),
    *(MINICPM, DEEPSEEK_XML, DEEPSEEK_FENCED, DEEPSEEK, KIMI, GRANITE, NEMOTRON, APERTUS, APRIEL),
    *(QWEN_XML, HERMES, LLAMA),
)
"""The first form whose signs are all in the template is the model's."""


def tool_form(template: str | None) -> ToolForm | None:
    """The form of a chat template; None: it has tools in no known form.

    Templates without tools get `HERMES`, which the prompt then describes; if they have calls as
    DeepSeek V3.1's, that form.
    """
    if template is None or "tools" not in template:
        known = template is not None and all(sign.search(template) for sign in DEEPSEEK.signs)
        return DEEPSEEK if known and "```json" not in (template or "") else HERMES
    return next((form for form in FORMS if all(sign.search(template) for sign in form.signs)), None)
