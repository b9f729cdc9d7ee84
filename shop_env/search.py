"""Full-text search: BM25 over weighted fields, exact, with every term's contribution computed when the index is built.

A term's score in a product does not depend on the rest of the query, so the index stores it per (term, product) pair and a query is a sum
of a few sparse columns. The formula is that of SQLite FTS5: one weighted term frequency over all fields, one length per product.
"""

import dataclasses
import functools
import hashlib
import io
import logging
import math
import os
import sys
import tempfile
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np

from shop_env import text
from shop_env.catalog import Catalog, Product
from shop_env.text import unique_tokens

K1 = 1.2
B = 0.75
IDF_FLOOR = 1e-6
RESULT_LIMIT = 150
_COMMON = 16  # a word of more than one product in so many also has its impacts as an array over all products: a few dozen words
WEIGHTS = {"title": 3.0, "brand": 2.0, "category": 2.0, "model": 2.5, "attributes": 1.5, "options": 1.2, "bullets": 0.8}
_SLACK = 1e-9  # sums of the same impacts in another order differ by less
_log = logging.getLogger(__name__)


def field_tokens(product: Product) -> Iterator[tuple[float, list[str]]]:
    """Each field's weight and its words, every word once per field."""
    texts = {
        "title": product.title,
        "brand": product.brand,
        "category": "\n".join(product.category),
        "model": product.model,
        "attributes": "\n".join(product.attributes),
        "options": "\n".join(value for values in product.options.values() for value in values),
        "bullets": "\n".join(product.bullets),
    }
    for name, weight in WEIGHTS.items():
        # "\n" is white space to norm(); the separator below keeps Han pairs from spanning two values.
        yield weight, unique_tokens(texts[name].replace("\n", " | "))


@dataclasses.dataclass(frozen=True)
class _Postings:
    """The index as arrays: term t of `vocabulary` occurs in the products rows[starts[t]:starts[t + 1]], ascending, each with its impact."""

    vocabulary: list[str]
    starts: np.ndarray  # [terms + 1] int64
    rows: np.ndarray  # [pairs] int32, places in the ascending list of ids
    impacts: np.ndarray  # [pairs] float64


def _build(catalog: Catalog) -> _Postings:
    num_products = len(catalog)
    vocabulary: dict[str, int] = {}
    terms, rows, frequencies = [], [], []
    lengths = np.zeros(num_products)
    for row, product in enumerate(catalog.values()):
        weighted: dict[str, float] = {}
        for weight, tokens in field_tokens(product):
            lengths[row] += len(tokens)
            for token in tokens:
                weighted[token] = weighted.get(token, 0.0) + weight
        terms.extend(vocabulary.setdefault(token, len(vocabulary)) for token in weighted)
        rows.extend([row] * len(weighted))
        frequencies.extend(weighted.values())
    term_of = np.asarray(terms, np.int64)
    order = np.argsort(term_of, kind="stable")  # by term; rows stay ascending inside a term
    counts = np.bincount(term_of, minlength=len(vocabulary))
    sorted_rows = np.asarray(rows, np.int32)[order]
    frequency = np.asarray(frequencies)[order]
    idf = np.array([max(math.log((num_products - n + 0.5) / (n + 0.5)), IDF_FLOOR) for n in counts])
    relative = lengths / max(lengths.mean(), 1.0) if num_products else lengths
    saturation = frequency * (K1 + 1) / (frequency + K1 * (1 - B + B * relative[sorted_rows]))
    return _Postings(list(vocabulary), np.concatenate([[0], np.cumsum(counts)]), sorted_rows, np.repeat(idf, counts) * saturation)


@runtime_checkable
class Searcher(Protocol):
    """What a shop searches with: `Index`, or in a benchmark what that is compared with."""

    def search(self, query: str, limit: int = RESULT_LIMIT) -> list[str]: ...


class Index:
    """Read-only search index over a catalogue.

    Args:
      catalog: what is searched.
      cache: directory that keeps built indexes, by the catalogue's hash and the code that built them; None: build every time. A damaged file is
        built anew with a warning, and a directory that cannot be written costs a warning, too: the cache never decides what is found.
    """

    def __init__(self, catalog: Catalog, cache: Path | None = None):
        postings = _build(catalog) if cache is None else _cached(catalog, cache)
        self._ids = np.array(list(catalog), object)  # ascending, so that a lower row number wins a tie
        self._vocabulary = {term: number for number, term in enumerate(postings.vocabulary)}
        self._starts, self._rows, self._impacts = postings.starts.tolist(), postings.rows, postings.impacts
        common = [term for term in range(len(self._vocabulary)) if _COMMON * self._count(term) > len(self._ids)]
        self._whole = {term: self._impacts_of_all_rows(term) for term in common}
        self._highest = {term: float(impacts.max()) for term, impacts in self._whole.items()}
        self._floor = {term: self._nth_best(term) for term in range(len(self._vocabulary)) if self._count(term) >= RESULT_LIMIT}
        self._cached = functools.lru_cache(maxsize=8192)(self.rank)  # the episodes of a group repeat each other's queries

    def _count(self, term: int) -> int:
        """How many products have the term."""
        return self._starts[term + 1] - self._starts[term]

    def _span(self, term: int) -> slice:
        return slice(self._starts[term], self._starts[term + 1])

    def _nth_best(self, term: int) -> float:
        impacts = self._impacts[self._span(term)]
        return float(np.partition(impacts, len(impacts) - RESULT_LIMIT)[len(impacts) - RESULT_LIMIT])

    def _impacts_of_all_rows(self, term: int) -> np.ndarray:
        impacts = np.zeros(len(self._ids))
        impacts[self._rows[self._span(term)]] = self._impacts[self._span(term)]
        return impacts

    def search(self, query: str, limit: int = RESULT_LIMIT) -> list[str]:
        """Ids of the best `limit` products that share a word with the query, best first, ties by id."""
        return list(self._cached(tuple(unique_tokens(query)), limit))

    def rank(self, tokens: tuple[str, ...], limit: int = RESULT_LIMIT) -> tuple[str, ...]:
        """`search` without its memory of earlier queries.

        Rare words are added up over their own products. Where all common words together cannot lift a product that has no rare word into the
        results (MaxScore), they are looked up for the products of the rare words only, else added up over all products.
        """
        terms = [term for token in tokens if (term := self._vocabulary.get(token)) is not None]
        common = [term for term in terms if term in self._whole]
        scores = np.zeros(len(self._ids))
        for term in terms:
            if term not in self._whole:
                scores[self._rows[self._span(term)]] += self._impacts[self._span(term)]  # a row occurs once per term
        floor = max((self._floor.get(term, 0.0) for term in terms), default=0.0) if limit <= RESULT_LIMIT else 0.0
        lift = sum(self._highest[term] for term in common)
        if lift < floor:
            rows = np.flatnonzero(scores > max(floor - lift - _SLACK, 0.0))
            best = scores[rows]
            for term in common:
                best += self._whole[term][rows]
        else:
            for term in common:
                scores += self._whole[term]
            rows = self._candidates(terms, scores, limit)
            best = scores[rows]
        if len(rows) > limit:
            kept = best >= np.partition(best, len(rows) - limit)[len(rows) - limit]  # all ties at the cut stay until ids decide
            rows, best = rows[kept], best[kept]
        return tuple(self._ids[rows[np.argsort(-best, kind="stable")][:limit]].tolist())

    def _candidates(self, terms: list[int], scores: np.ndarray, limit: int) -> np.ndarray:
        """Rows, ascending, among which the best `limit` are.

        The `limit`-th best of a part of the rows bounds the `limit`-th best of all from below; the part is the rows of the rarest word that has
        enough of them. Most queries leave a few hundred of ten thousand rows to sort.
        """
        rarest = min((term for term in terms if self._count(term) >= limit > 0), key=self._count, default=None)
        if rarest is None:
            return np.flatnonzero(scores > 0)  # ten times as fast as without the comparison
        part = scores[self._rows[self._span(rarest)]]
        return np.flatnonzero(scores >= np.partition(part, len(part) - limit)[len(part) - limit])


# ------------------------------------------------------------------------------------------------------------- the cache


class _Damaged(Exception):
    """A cache file that is not what was written."""


def _cache_file(catalog: Catalog, directory: Path) -> Path:
    """The index follows from the catalogue, from this module and the word rules, and from Python's Unicode tables."""
    code = b"".join(Path(module).read_bytes() for module in (__file__, str(text.__file__)))
    key = hashlib.sha256(f"{catalog.hash} {unicodedata.unidata_version} {sys.byteorder} ".encode() + code).hexdigest()
    return directory / f"shop-index-{key[:40]}"


def _cached(catalog: Catalog, directory: Path) -> _Postings:
    path = _cache_file(catalog, directory)
    try:
        return _decode(path.read_bytes())
    except FileNotFoundError:
        pass
    except _Damaged as e:
        _log.warning("%s is damaged (%s); the search index is built anew", path, e)
    except OSError as e:
        _log.warning("%s cannot be read (%s); the search index is built anew", path, e.strerror or e)
    postings = _build(catalog)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory, prefix=f".{path.name}.", delete=False) as temporary:
            temporary.write(_encode(postings))
        os.replace(temporary.name, path)  # a reader sees the whole file or none; one cut short by a power loss fails its checksum
    except OSError as e:
        _log.warning("%s cannot be written (%s); the next start builds the search index again", path, e.strerror or e)
    return postings


def _encode(postings: _Postings) -> bytes:
    """sha256 of the rest, then a NumPy archive."""
    buffer = io.BytesIO()
    vocabulary = np.frombuffer("\n".join(postings.vocabulary).encode(), np.uint8)  # words have no line breaks
    np.savez(buffer, vocabulary=vocabulary, starts=postings.starts, rows=postings.rows, impacts=postings.impacts)
    return hashlib.sha256(buffer.getvalue()).digest() + buffer.getvalue()


def _decode(data: bytes) -> _Postings:
    if hashlib.sha256(data[32:]).digest() != data[:32]:
        raise _Damaged(f"its {len(data)} bytes do not have the checksum that they begin with")
    with np.load(io.BytesIO(data[32:]), allow_pickle=False) as arrays:
        words = arrays["vocabulary"].tobytes().decode()
        return _Postings(words.split("\n") if words else [], arrays["starts"], arrays["rows"], arrays["impacts"])
