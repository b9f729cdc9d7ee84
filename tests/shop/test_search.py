"""The index against two references: the formula written out naively, and SQLite's FTS5 with the same weights."""

import math
import random
import sqlite3

import numpy as np
import pytest

from shop_env.catalog import Catalog, Product
from shop_env.search import IDF_FLOOR, K1, WEIGHTS, B, Index, field_tokens
from shop_env.text import unique_tokens

WORDS = "red blue mug jacket acme bolt steel 防水 外套 红色 small large 500ml cotton wool".split()


def random_catalog(rng: random.Random, size: int, words=WORDS) -> Catalog:
    def phrase(low: int, high: int) -> str:
        return " ".join(rng.choices(words, k=rng.randint(low, high)))

    return Catalog(
        Product(
            f"p{i:03d}",
            phrase(1, 6),
            phrase(0, 1),
            (phrase(1, 1), phrase(1, 1)),
            tuple(phrase(1, 2) for _ in range(3)),
            {"o": {word: None for word in rng.sample(words, 2)}},
            5,
            model=phrase(0, 1),
            bullets=(phrase(0, 4),),
        )
        for i in range(size)
    )


def naive_scores(catalog: Catalog, query: str) -> dict[str, float]:
    fields = {i: list(field_tokens(p)) for i, p in catalog.items()}
    length = {i: sum(len(tokens) for _, tokens in f) for i, f in fields.items()}
    mean = sum(length.values()) / len(length)
    scores: dict[str, float] = {}
    for token in unique_tokens(query):
        frequency = {i: sum(w for w, tokens in f if token in tokens) for i, f in fields.items()}
        n = sum(v > 0 for v in frequency.values())
        idf = max(math.log((len(catalog) - n + 0.5) / (n + 0.5)), IDF_FLOOR)
        for i, f in frequency.items():
            if f:
                scores[i] = scores.get(i, 0) + idf * f * (K1 + 1) / (f + K1 * (1 - B + B * length[i] / mean))
    return scores


@pytest.mark.parametrize("seed", range(8))
def test_ranking_is_that_of_the_written_out_formula(seed):
    rng = random.Random(seed)
    catalog = random_catalog(rng, rng.randint(1, 60))
    index = Index(catalog)
    for limit in (3, 150):
        for _ in range(20):
            query = " ".join(rng.choices([*WORDS, "防水外套", "absent"], k=rng.randint(1, 4)))
            scores = naive_scores(catalog, query)
            got = index.search(query, limit)
            assert len(got) == len(set(got)) == min(limit, len(scores))
            values = np.array([scores[i] for i in got])
            np.testing.assert_allclose(values, sorted(scores.values(), reverse=True)[: len(got)], rtol=1e-12)


def test_equal_scores_are_ordered_by_id_also_at_the_cut():
    catalog = Catalog(Product(f"p{i}", "red mug", "", (), (), {}, 5) for i in (4, 2, 3, 1, 0))
    assert Index(catalog).search("mug") == ["p0", "p1", "p2", "p3", "p4"]
    assert Index(catalog).search("red mug", limit=2) == ["p0", "p1"]


def test_same_scores_as_fts5():
    words = [w for w in WORDS if w.isascii()]
    rng = random.Random(7)
    catalog = random_catalog(rng, 300, words)
    try:
        db = sqlite3.connect(":memory:")
        db.execute(f"create virtual table t using fts5(id unindexed, {', '.join(WEIGHTS)})")
    except sqlite3.OperationalError:
        pytest.skip("this SQLite lacks FTS5")
    for i, p in catalog.items():
        db.execute(f"insert into t values (?{', ?' * len(WEIGHTS)})", [i, *(" ".join(tokens) for _, tokens in field_tokens(p))])
    index = Index(catalog)
    weights = ", ".join(map(str, [0, *WEIGHTS.values()]))
    for _ in range(50):
        tokens = rng.sample(words, rng.randint(1, 4))
        match = " OR ".join(f'"{t}"' for t in tokens)
        rows = dict(db.execute(f"select id, -bm25(t, {weights}) from t where t match ?", [match]))
        got = index.search(" ".join(tokens), 150)
        np.testing.assert_allclose([rows[i] for i in got], sorted(rows.values(), reverse=True)[:150], rtol=1e-9)


@pytest.mark.parametrize("query", ["", "!?", "absent", "\ud800", "a" * 10000])
def test_queries_without_a_known_word_find_nothing(query):
    assert Index(random_catalog(random.Random(0), 5)).search(query) == []


def test_an_empty_catalogue_is_searchable():
    assert Index(Catalog([])).search("mug") == []


def test_han_pairs_do_not_span_values():
    catalog = Catalog([Product("a", "t", "", (), ("防水", "外套"), {}, 5), Product("b", "t", "", (), ("防水外套",), {}, 5)])
    assert Index(catalog).search("水外") == ["b"]
