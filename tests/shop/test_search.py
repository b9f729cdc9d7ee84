"""The index against two references: the formula written out naively, and SQLite's FTS5 with the same weights."""

import math
import random
import sqlite3

import numpy as np
import pytest

from benchmarks.peers.fts5 import Fts5Index, explain_difference
from shop_env import search
from shop_env.catalog import Catalog, Product
from shop_env.search import IDF_FLOOR, K1, B, Index, field_tokens
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


def test_common_words_looked_up_for_few_products_only_change_nothing(monkeypatch):
    """Both ways through a query: the common words added up everywhere, and only where a rare word is."""
    monkeypatch.setattr(search, "RESULT_LIMIT", 4)
    monkeypatch.setattr(search, "_COMMON", 3)
    rng = random.Random(5)
    rare = [f"rare{i}" for i in range(12)]
    catalog = random_catalog(rng, 80, [*["mug", "red", "acme"] * 12, *WORDS, *rare])
    index = Index(catalog)
    summed = []
    original = index._candidates
    monkeypatch.setattr(index, "_candidates", lambda *arguments: summed.append(1) or original(*arguments))
    queries = [" ".join(rng.sample([*WORDS, *rare], rng.randint(1, 4))) for _ in range(200)]
    for query in queries:
        scores = naive_scores(catalog, query)
        for limit in (1, 4, 5):  # five is more than what is known beforehand of a word's best products
            got = index.search(query, limit)
            assert len(got) == len(set(got)) == min(limit, len(scores))
            np.testing.assert_allclose([scores[i] for i in got], sorted(scores.values(), reverse=True)[: len(got)], rtol=1e-12)
    assert 100 < len(summed) < 400, "of some 550 searches without their memory"


def test_equal_scores_are_ordered_by_id_also_at_the_cut():
    catalog = Catalog(Product(f"p{i}", "red mug", "", (), (), {}, 5) for i in (4, 2, 3, 1, 0))
    assert Index(catalog).search("mug") == ["p0", "p1", "p2", "p3", "p4"]
    assert Index(catalog).search("red mug", limit=2) == ["p0", "p1"]


def test_same_results_as_fts5():
    """The top 150 of SQLite's own search, for 400 queries in both scripts; benchmarks/bench_search.py does the same on the full catalogue."""
    rng = random.Random(7)
    catalog = random_catalog(rng, 600)
    try:
        fts5 = Fts5Index(catalog)
    except sqlite3.OperationalError:
        pytest.skip("this SQLite lacks FTS5")
    index = Index(catalog)
    differences = []
    for _ in range(400):
        query = " ".join(rng.choices([*WORDS, "防水外套", "absent"], k=rng.randint(1, 6)))
        differences.append(explain_difference(index.search(query), fts5.scores(query)))
    # Sums in another order: products whose scores agree to 9 digits may change places. More than a few would be another formula.
    assert "wrong" not in differences and differences.count("rounding") < 40, differences


def test_the_comparison_with_fts5_can_fail():
    oracle = {"a": 2.0, "b": 1.0, "c": 1.0, "d": 1.0 - 1e-13}
    assert explain_difference(["a", "b", "c", "d"], oracle) == ""
    assert explain_difference(["a", "b", "d", "c"], oracle) == "rounding"
    for wrong in (["b", "a", "c", "d"], ["a", "b", "c"], ["a", "b", "b", "d"], ["a", "b", "c", "d", "e"], ["a", "b", "c", "e"]):
        assert explain_difference(wrong, oracle) == "wrong"
    assert explain_difference(["a", "b"], oracle, limit=2) == ""


@pytest.mark.parametrize("query", ["", "!?", "absent", "\ud800", "a" * 10000])
def test_queries_without_a_known_word_find_nothing(query):
    assert Index(random_catalog(random.Random(0), 5)).search(query) == []


def test_an_empty_catalogue_is_searchable():
    assert Index(Catalog([])).search("mug") == []


def test_han_pairs_do_not_span_values():
    catalog = Catalog([Product("a", "t", "", (), ("防水", "外套"), {}, 5), Product("b", "t", "", (), ("防水外套",), {}, 5)])
    assert Index(catalog).search("水外") == ["b"]


# ------------------------------------------------------------------------------------------------------------- the cache


def found(index):
    return [index.search(query) for query in ("red mug", "防水外套", "absent", "acme 500ml wool cotton")]


def built(monkeypatch):
    """Counts how often an index is really built."""
    calls = []
    original = search._build
    monkeypatch.setattr(search, "_build", lambda catalog: calls.append(1) or original(catalog))
    return calls


def test_a_cached_index_finds_the_same_and_is_not_built_again(tmp_path, monkeypatch, caplog):
    calls = built(monkeypatch)
    catalog = random_catalog(random.Random(1), 80)
    plain = found(Index(catalog))
    assert found(Index(catalog, tmp_path / "new" / "cache")) == found(Index(catalog, tmp_path / "new" / "cache")) == plain
    assert len(calls) == 2 and len(list((tmp_path / "new" / "cache").iterdir())) == 1
    other = random_catalog(random.Random(2), 80)  # another catalogue has another file
    assert found(Index(other, tmp_path / "new" / "cache")) == found(Index(other)) != plain
    assert len(list((tmp_path / "new" / "cache").iterdir())) == 2 and not caplog.records
    assert found(Index(Catalog([]), tmp_path)) == found(Index(Catalog([]), tmp_path)) == [[]] * 4


@pytest.mark.parametrize("damage", ["empty", "cut", "flipped", "other"])
def test_a_damaged_cache_is_built_anew_with_a_warning(tmp_path, monkeypatch, caplog, damage):
    catalog = random_catalog(random.Random(1), 80)
    plain = found(Index(catalog, tmp_path))
    (path,) = tmp_path.iterdir()
    data = path.read_bytes()
    middle = len(data) // 2
    flipped = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
    path.write_bytes({"empty": b"", "cut": data[:-9], "flipped": flipped, "other": b"not an index" * 9}[damage])
    calls = built(monkeypatch)
    assert found(Index(catalog, tmp_path)) == plain and len(calls) == 1
    assert "damaged" in caplog.text and str(path) in caplog.text
    assert path.read_bytes() == data
    assert found(Index(catalog, tmp_path)) == plain and len(calls) == 1


def test_a_cache_that_cannot_be_used_costs_a_warning_only(tmp_path, caplog):
    catalog = random_catalog(random.Random(1), 20)
    (tmp_path / "file").write_text("in the way")
    assert found(Index(catalog, tmp_path / "file")) == found(Index(catalog))
    assert caplog.text.count("WARNING") >= 1 and "built" in caplog.text


def test_other_code_does_not_reuse_an_index(tmp_path, monkeypatch):
    """The rules of words and weights are part of the key: a cache may not outlive them."""
    catalog = random_catalog(random.Random(1), 20)
    Index(catalog, tmp_path)
    changed = tmp_path / "text.py"
    changed.write_text("# other rules\n")
    monkeypatch.setattr(search.text, "__file__", str(changed))
    calls = built(monkeypatch)
    Index(catalog, tmp_path / "cache")
    Index(catalog, tmp_path)
    assert len(calls) == 2
