"""Text rules shared by catalogue, search, reward and session: cleaning, matching form and tokens.

Han text is cut into overlapping character pairs, so that unspaced text has words to compare; everything else into runs of letters and
digits.
"""

import re
import unicodedata

# Control, format and surrogate characters, and what could break an observation's quoting or imitate a chat template's markup.
_UNSAFE = re.compile('[\x00-\x1f\x7f-\x9f\xad"<>\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff0-\ufffb\ud800-\udfff]')
_HAN = "\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af"
_RUNS = re.compile(f"[{_HAN}]+|[^\\W_{_HAN}]+")
_HAN_CHAR = re.compile(f"[{_HAN}]")


def clean(text: str) -> str:
    """One line of plain text: single spaces, no control characters, double quotes or angle brackets. Idempotent."""
    return " ".join(_UNSAFE.sub(" ", text).split())


def norm(text: str) -> str:
    """The form in which texts are compared for equality: NFKC, casefold, single spaces."""
    return " ".join(unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()).split())


def has_han(text: str) -> bool:
    return _HAN_CHAR.search(text) is not None


def tokenize(text: str) -> list[str]:
    """Words of `text` in order, repeats included.

    >>> tokenize("Acme 防水外套 XL-2")
    ['acme', '防水', '水外', '外套', 'xl', '2']
    """
    tokens = []
    for run in _RUNS.findall(norm(text)):
        if len(run) > 1 and _HAN_CHAR.match(run):
            tokens.extend(run[i : i + 2] for i in range(len(run) - 1))
        else:
            tokens.append(run)
    return tokens


def unique_tokens(text: str) -> list[str]:
    """Words of `text`, each once, in order of first appearance."""
    return list(dict.fromkeys(tokenize(text)))
