"""Full-text search: BM25 over weighted fields, exact, with every term's contribution computed when the index is built.

A term's score in a product does not depend on the rest of the query, so the index stores it per (term, product) pair and a query is a sum
of a few sparse columns. The formula is that of SQLite FTS5: one weighted term frequency over all fields, one length per product.
"""

import functools
import math
from collections.abc import Iterator

import numpy as np

from shop_env.catalog import Catalog, Product
from shop_env.text import unique_tokens

K1 = 1.2
B = 0.75
IDF_FLOOR = 1e-6
RESULT_LIMIT = 150
WEIGHTS = {"title": 3.0, "brand": 2.0, "category": 2.0, "model": 2.5, "attributes": 1.5, "options": 1.2, "bullets": 0.8}


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


class Index:
    """Read-only search index over a catalogue."""

    def __init__(self, catalog: Catalog):
        self._ids = list(catalog)  # ascending, so that a lower row number wins a tie
        num_products = len(self._ids)
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
        self._vocabulary = vocabulary
        self._starts = np.concatenate([[0], np.cumsum(counts)])
        self._rows = np.asarray(rows, np.int32)[order]
        frequency = np.asarray(frequencies)[order]
        idf = np.array([max(math.log((num_products - n + 0.5) / (n + 0.5)), IDF_FLOOR) if n < num_products + 0.5 else IDF_FLOOR for n in counts])
        relative = lengths / max(lengths.mean(), 1.0) if num_products else lengths
        saturation = frequency * (K1 + 1) / (frequency + K1 * (1 - B + B * relative[self._rows]))
        self._impacts = np.repeat(idf, counts) * saturation
        self._cached = functools.lru_cache(maxsize=8192)(self._rank)  # the episodes of a group repeat each other's queries

    def search(self, query: str, limit: int = RESULT_LIMIT) -> list[str]:
        """Ids of the best `limit` products that share a word with the query, best first, ties by id."""
        return list(self._cached(tuple(unique_tokens(query)), limit))

    def _rank(self, tokens: tuple[str, ...], limit: int) -> tuple[str, ...]:
        scores = np.zeros(len(self._ids))
        for token in tokens:
            term = self._vocabulary.get(token)
            if term is not None:
                span = slice(self._starts[term], self._starts[term + 1])
                scores[self._rows[span]] += self._impacts[span]  # a row occurs once per term
        rows = np.flatnonzero(scores)
        if len(rows) > limit:
            cut = np.partition(scores[rows], len(rows) - limit)[len(rows) - limit]
            rows = rows[scores[rows] >= cut]  # all ties at the cut stay until ids decide
        best = rows[np.argsort(-scores[rows], kind="stable")][:limit]
        return tuple(self._ids[row] for row in best)
