"""How skill code compares words: one normal form, phrases matched at word boundaries, Chinese text cut into character pairs."""

import re
import unicodedata

_HAN = "\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_RUN = re.compile(f"[{_HAN}]+|[^\\W_{_HAN}]+")
_HAN_CHARACTER = re.compile(f"[{_HAN}]")


def normal(text: str) -> str:
    """NFKC, casefold, single spaces."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def tokens(text: str) -> list[str]:
    """Words and numbers in order; a run of Han characters becomes its overlapping pairs.

    >>> tokens("Red防水外套 (XL)")
    ['red', '防水', '水外', '外套', 'xl']
    """
    found: list[str] = []
    for run in _RUN.findall(normal(text)):
        pairs = len(run) > 1 and _HAN_CHARACTER.match(run)
        found += [run[i : i + 2] for i in range(len(run) - 1)] if pairs else [run]
    return found


def says(text: str, phrase: str) -> bool:
    """Whether `phrase` occurs in `text` without cutting a word; Han characters have no boundaries.

    >>> says("a zippered coat", "red"), says("a Red coat", "red"), says("红色外套", "红")
    (False, True, True)
    """
    text, phrase = normal(text), normal(phrase)
    start = text.find(phrase) if phrase else -1
    while start >= 0:
        if not _inside_word(text, start) and not _inside_word(text, start + len(phrase)):
            return True
        start = text.find(phrase, start + 1)
    return False


def _inside_word(text: str, i: int) -> bool:
    """Whether position i lies between two letters or digits of one word."""
    around = text[i - 1 : i + 1] if 0 < i < len(text) else ""
    return len(around) == 2 and around.isalnum() and not _HAN_CHARACTER.search(around)
