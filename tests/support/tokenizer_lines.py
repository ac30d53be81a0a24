"""Lines of text of many scripts and kinds, and small vocabularies, for tests of tokenizers.

All of it comes from a seed, so that a run is like another.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from support.tiny import byte_letters, gguf_writer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPACE = "\u2581"

_SCRIPTS = {
    "Latin": (0x41, 0x5B, 0x61, 0x7B),
    "Latin, accents": (0xC0, 0x180, 0x1E00, 0x1EFA),
    "Greek": (0x391, 0x3CA, 0x1F00, 0x1F16),
    "Cyrillic": (0x410, 0x460, 0x48A, 0x4A0),
    "Armenian": (0x531, 0x557, 0x561, 0x588),
    "Hebrew": (0x5D0, 0x5EB, 0x5B0, 0x5BD),
    "Arabic": (0x620, 0x653, 0x660, 0x66A),
    "Devanagari": (0x901, 0x950, 0x966, 0x970),
    "Bengali": (0x981, 0x9CF),
    "Tamil": (0xB82, 0xBCE),
    "Telugu": (0xC01, 0xC4E),
    "Thai": (0xE01, 0xE3B, 0xE40, 0xE5B),
    "Lao": (0xE81, 0xECE),
    "Tibetan": (0xF40, 0xF6D, 0xF71, 0xF85),
    "Georgian": (0x10A0, 0x10C6, 0x10D0, 0x10FB),
    "Hangul": (0xAC00, 0xAD00, 0x1100, 0x1113),
    "Ethiopic": (0x1200, 0x1249),
    "Cherokee": (0x13A0, 0x13F6),
    "Khmer": (0x1780, 0x17D3),
    "Mongolian": (0x1820, 0x1878),
    "Kana": (0x3041, 0x3097, 0x30A1, 0x30FB),
    "Ideographs": (0x4E00, 0x4F00, 0x9F00, 0x9FA6, 0x3400, 0x3410, 0x20000, 0x20010),
    "Full width": (0xFF01, 0xFF5F, 0xFF65, 0xFF9F),
    "Deseret": (0x10400, 0x10450),
    "Letters of mathematics": (0x1D400, 0x1D455),
    "Numbers": (0xB2, 0xB4, 0xBC, 0xBF, 0x2150, 0x2189, 0x2460, 0x2480, 0x9E6, 0x9F0),
    "Punctuation": (0x21, 0x30, 0x3A, 0x41, 0x5B, 0x61, 0x7B, 0x7F, 0xA1, 0xAD, 0x2010, 0x2028),
    "Symbols": (0x20A0, 0x20C0, 0x2190, 0x21D0, 0x2200, 0x2230, 0x2500, 0x2520, 0x2581, 0x2583),
    "Punctuation, East Asia": (0x3001, 0x3020, 0x30FB, 0x30FD),
    "Emoji": (0x1F300, 0x1F340, 0x1F600, 0x1F640, 0x1F900, 0x1F930, 0x2600, 0x2640),
    "Marks": (0x300, 0x330, 0x591, 0x5A0, 0x20D0, 0x20DD),
    "Private use": (0xE000, 0xE004, 0xF0000, 0xF0002),
    "Format": (0x200B, 0x2010, 0xFEFF, 0xFF00, 0xAD, 0xAE, 0xFE0E, 0xFE10),
}
_SPACES = " " * 12 + "\t\t\n\n\r\u00a0\u2003\u3000\u2028\u0085\v\f"
_ZWJ = (
    "👩\u200d👩\u200d👧",
    "🏳\ufe0f\u200d🌈",
    "👍🏽",
    "🇩🇪🇯🇵",
    "1\ufe0f\u20e3",
    "🧑🏿\u200d🚀",
    "❤\ufe0f",
)
_WORDS = [
    *("the", "and", "of", "to", "in", "user", "assistant", "I'll", "we've", "DON'T", "it's"),
    *("He'D", "y'all'S", "can't", "'tis", "rock'n'roll", "HTTPServer", "camelCase", "snake_case"),
    *("SCREAMING", "naïve", "Ångström", "straße", "İstanbul", "ΑΒΓ", "ςΣ", "ĳ", "ǅ", "ﬁ"),
    *("don\u2019t", "'LL", "'Ve", "x²", "½", "Ⅷ", "\uff14\uff12", "e.g.", "U.S.A."),
    *("a+b=c", "C++", "$5.00", "50%", "@user", "#tag", "I'\u017f", "fi'M", "return", "..."),
]
_CODE = (
    "def f(x):\n\treturn x ** 2  # {w}\n",
    "for (int i = 0; i < {n}; ++i) {{ a[i] += '{w}'; }}\r\n",
    '    if {w} == None:\n        raise ValueError(f"{{{w}!r}}")\n\n\n',
    '<div class="{w}">&nbsp;{n}</div>',
    '{{"{w}": [{n}, -{n}.5e-3, null], "": {{}}}}',
    "https://example.org/{w}?q={n}&r=%20#{w}",
    "SELECT * FROM {w} WHERE id>={n}; -- {w}",
    "\\frac{{{n}}}{{{w}}} \\\\ $${w}_{{{n}}}$$",
    "| {w} | {n} |\n|---|--:|\n",
    "!!!??? ...... ------ ======= ```{w}``` ~~{w}~~ **{n}**",
    "<|im_start|>{w}<|im_end|> </s> [INST] <0x0A> \u2581{w}\u2581\u2581 <unk>",
)


def lines(count: int, seed: int = 0) -> list[str]:
    """Lines of up to about 200 characters, line breaks inside included."""
    rng = random.Random(seed)
    letters = [*_letters()]
    kinds: list[Callable[[], str]] = [
        lambda: _sentence(rng, rng.choice(letters)),
        lambda: _sentence(rng, letters[0], digits=True),
        lambda: " ".join(rng.choice(_WORDS) for _ in range(rng.randint(1, 12))),
        lambda: rng.choice(_CODE).format(w=_word(rng, letters), n=_number(rng)),
        lambda: _mixed(rng, letters),
        lambda: "".join(rng.choice([*_ZWJ, " ", "a", _number(rng)]) for _ in range(8)),
        lambda: _marked(rng, letters),
        lambda: _spaced(rng, letters),
        lambda: " ".join(_number(rng) for _ in range(rng.randint(1, 6))),
    ]
    return [rng.choice(kinds)()[:200] for _ in range(count)]


def byte_pairs(count: int = 65_536) -> dict[str, Any]:
    """Metadata of a BPE tokenizer that joins any two bytes, or `count` pairs, but no more.

    So nearly every cut before the merges shows in the ids. Some words are tokens without merges,
    which only a tokenizer that takes whole words finds.
    """
    letters = byte_letters()
    pairs = [left + right for left in letters for right in letters]
    random.Random(0).shuffle(pairs)
    pairs = pairs[:count]
    coded = {"Ġthe", "Ġand", "user", "HTTPServer", "ĊĊĊ", "...", "def", "Ġreturn"}
    tokens = [*letters, *pairs, *sorted(coded - set(pairs)), "<s>", "</s>"]
    plain = len(tokens) - 2
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * plain + [3, 3],
        "tokenizer.ggml.merges": [f"{pair[0]} {pair[1]}" for pair in pairs],
        "tokenizer.ggml.bos_token_id": plain,
        "tokenizer.ggml.eos_token_id": plain + 1,
        "tokenizer.ggml.add_bos_token": False,
    }


def sentence_piece(*more: tuple[str, int], words: str = "", **options: Any) -> dict[str, Any]:
    """Metadata like Llama 2's: letters, and `words` whose merges come in their order."""
    named = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
    named += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
    plain = [*words.split(), *(SPACE + "abcdefghijklmnopqrstuvwxyz.")]
    ranked = {text: -float(rank) for rank, text in enumerate(dict.fromkeys(plain))}
    named += [(text, NORMAL) for text in ranked] + [*more]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [text for text, _ in named],
        "tokenizer.ggml.token_type": [kind for _, kind in named],
        "tokenizer.ggml.scores": [ranked.get(text, 0.0) for text, _ in named],
        **{f"tokenizer.ggml.{name}": value for name, value in options.items()},
    }


def _letters() -> Iterator[list[str]]:
    for ends in _SCRIPTS.values():
        codes = (code for a, b in zip(ends[::2], ends[1::2], strict=True) for code in range(a, b))
        yield [chr(code) for code in codes]


def _word(rng: random.Random, letters: list[list[str]]) -> str:
    if rng.random() < 0.5:
        return rng.choice(_WORDS)
    script = rng.choice(letters)
    return "".join(rng.choice(script) for _ in range(rng.randint(1, 9)))


def _sentence(rng: random.Random, script: list[str], *, digits: bool = False) -> str:
    words = ["".join(rng.choice(script) for _ in range(rng.randint(1, 9))) for _ in range(8)]
    if digits:
        words = [word + _number(rng) if rng.random() < 0.3 else word for word in words]
    return rng.choice(["", " ", "  "]) + " ".join(words) + rng.choice([".", "!\n", "?", "\n\n", ""])


def _number(rng: random.Random) -> str:
    digits = str(rng.randrange(10 ** rng.randint(1, 12)))
    return rng.choice(
        [digits, f"{int(digits):,}", f"{digits}.{digits}", f"-{digits}", f"{digits}th"]
    )


def _mixed(rng: random.Random, letters: list[list[str]]) -> str:
    """Letters of any script, one after the other."""
    return "".join(
        rng.choice(_SPACES) if rng.random() < 0.15 else rng.choice(rng.choice(letters))
        for _ in range(rng.randint(1, 80))
    )


def _marked(rng: random.Random, letters: list[list[str]]) -> str:
    """Letters with combining marks."""
    marks = "\u0300\u0301\u0308\u030a\u0327\u0323\u3099\u093c\u0bd7"
    script = rng.choice(letters)
    return "".join(
        rng.choice(script) + "".join(rng.choices(marks, k=rng.randint(0, 2)))
        if rng.random() < 0.85
        else " "
        for _ in range(rng.randint(1, 40))
    )


def _spaced(rng: random.Random, letters: list[list[str]]) -> str:
    """Words between runs of white space of all kinds."""
    return "".join(
        _word(rng, letters) + "".join(rng.choices(_SPACES, k=rng.randint(0, 6))) for _ in range(8)
    )


def write_vocabulary(path: Path, fields: Mapping[str, Any], architecture: str = "llama") -> Path:
    """Write a GGUF file that has a tokenizer and no weights; returns its path."""
    with gguf_writer(path, architecture, fields):
        return path
