r"""Splitting rules of each `tokenizer.ggml.pre`, applied before byte merges, as data.

GGUF has only a name. The names are defined in llama.cpp (`llm_tokenizer_bpe` and
`llama_vocab::impl::load` in src/llama-vocab.cpp). If that file quotes the expression of the
model's own tokenizer.json and approximates it, this one has the model's: contractions ignore case,
and `\p{Lu}`, `\p{Ll}` and `\p{M}` have their usual meaning in `tekken`, `gpt-4o` and similar.
Unicode normalization is not in GGUF either; `nfc` is from the models' tokenizers in transformers.

Invariant: every name was compared with llama.cpp on many lines.
"""

from typing import NamedTuple


class PreTokenizer(NamedTuple):
    patterns: tuple[str, ...]
    """Each splits the pieces of those before it; matches and the text between are the pieces."""
    ignore_merges: bool = False
    """True if a piece that is a token needs no merges."""
    nfc: bool = False
    """True if the model normalizes text to NFC first; llama.cpp does not."""
    add_bos: bool = False
    """Default of `add_bos_token`, if missing in the file."""
    marks_spaces: bool = False
    """Tokens are plain text, spaces are U+2581, other bytes `<0x0A>`; else GPT-2's byte letters."""


_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+"
_SYMBOLS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
_LLAMA3 = _CONTRACTIONS + _WORDS + r"|\p{N}{1,3}" + _SYMBOLS + _SPACES
_QWEN2 = _CONTRACTIONS + _WORDS + r"|\p{N}" + _SYMBOLS + _SPACES
_QWEN35 = (
    _CONTRACTIONS
    + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    + _SPACES
)
_JAIS2 = (
    _CONTRACTIONS
    + _WORDS
    + r"|\p{N}{1,3}"
    + _SYMBOLS
    + r"|\s*[\r\n]+|"
    + "|".join(rf"\s{{{n}}}(?!\S)" for n in (512, 256, 128, 64, 32, 16, 8, 4))
    + r"|\s{1,2}(?!\S)|\s{1}"
)
_SEED = _CONTRACTIONS + _WORDS + r"|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+" + _SPACES
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)

_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(ending: str, digits: str) -> str:
    """Match words in upper case, then in lower case, as in o200k_base of tiktoken."""
    first = r"[^\r\n\p{L}\p{N}]?"
    return (
        f"{first}{_UPPER}*{_LOWER}+{ending}|{first}{_UPPER}+{_LOWER}*{ending}|{digits}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _SPACES
    )


_TEKKEN = _cased("", r"\p{N}")
_O200K = _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}")

_LINES = r"[^\n]+|[\n]+"
_CJK = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_ASCII_PUNCTUATION = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
_DEEPSEEK3 = (
    rf"{_ASCII_PUNCTUATION}[A-Za-z]+|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*" + _SPACES
)
_BLOOM = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af"
    "\u0370-\u0373\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1"
    "\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5"
    "\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3"
    "\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115"
    "\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149"
    "\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06"
    "\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df"
    "\U0001e900-\U0001e943"
)
_WIDE = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"

_digits_then_gpt2 = PreTokenizer((r"\p{N}", _GPT2))
_gpt2 = PreTokenizer((_GPT2,))
_llama3 = PreTokenizer((_LLAMA3,), ignore_merges=True, add_bos=True)
_cl100k = PreTokenizer((_LLAMA3,))
_qwen2 = PreTokenizer((_QWEN2,))
_o200k = PreTokenizer((_O200K,))
_deepseek3 = PreTokenizer((r"\p{N}{1,3}", _CJK, _DEEPSEEK3))
_bloom = PreTokenizer((_BLOOM,))
_bailing = PreTokenizer((_BAILING,))

PRE_TOKENIZERS = {
    # llama.cpp does this for files older than the field.
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    **dict.fromkeys(
        ("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "jais", "trillion", "exaone4"), _gpt2
    ),
    "granite-docling": _gpt2,
    **dict.fromkeys(("mpt", "olmo"), _gpt2._replace(nfc=True)),
    **dict.fromkeys(
        ("starcoder", "refact", "smollm", "codeshell", "exaone", "minerva-7b"), _digits_then_gpt2
    ),
    "command-r": _digits_then_gpt2._replace(nfc=True),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "lfm2", "midm-2.0"), _llama3
    ),
    **dict.fromkeys(("smaug-bpe", "dbrx", "chatglm-bpe"), _cl100k),
    **dict.fromkeys(("glm4", "glm5"), _cl100k._replace(ignore_merges=True)),
    "qwen2": _qwen2._replace(nfc=True),
    **dict.fromkeys(
        ("deepseek-r1-qwen", "kormo", "megrez", "stablelm2", "hunyuan", "solar-open", "grok-2"),
        _qwen2,
    ),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), _o200k),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), _deepseek3),
    "deepseek-llm": PreTokenizer(
        (
            r"[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
            r"\s+$",
            _WIDE,
            r"\p{N}+",
        )
    ),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _WIDE, r"\p{N}")),
    "falcon": PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")),
    **dict.fromkeys(("bloom", "poro-chat", "gpt3-finnish"), _bloom),
    "viking": PreTokenizer((_BLOOM, r"\p{N}")),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _bailing),
    "seed-coder": PreTokenizer((_SEED,)),
    "jais-2": PreTokenizer((_JAIS2,)),
    "minicpm5": PreTokenizer(
        (r"\p{N}{1,3}", _CONTRACTIONS + _WORDS + r"|\p{N}+" + _SYMBOLS + _SPACES),
        ignore_merges=True,
    ),
    "gemma4": PreTokenizer((_LINES,), add_bos=True, marks_spaces=True),
    "sarvam-moe": PreTokenizer((_LINES,), marks_spaces=True),
}
"""`tokenizer.ggml.pre` -> its splitting rules."""
