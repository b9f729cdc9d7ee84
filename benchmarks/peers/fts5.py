"""SQLite FTS5 as the shop's search: the oracle of the ranking, and the peer that the index and the service are measured against."""

import sqlite3
import threading
from collections.abc import Sequence

from shop_env.catalog import Catalog
from shop_env.search import RESULT_LIMIT, WEIGHTS, field_tokens
from shop_env.text import unique_tokens


class Fts5Index:
    """The same words in the same fields with the same weights, in a table of SQLite. Usable from many threads.

    Args:
      catalog: what is searched.
      path: of the database; ":memory:" for one thread only.
    """

    def __init__(self, catalog: Catalog, path: str = ":memory:"):
        self._path = path
        self._local = threading.local()
        self._bm25 = f"bm25({', '.join(map(str, [0.0, *WEIGHTS.values()]))})"
        db = self._connection()
        # The words arrive cut and folded. The tokenizer must not fold them again, or it would equate what the shop tells apart.
        db.execute(f"create virtual table goods using fts5(id unindexed, {', '.join(WEIGHTS)}, tokenize = 'unicode61 remove_diacritics 0')")
        rows = ([i, *(" ".join(words) for _, words in field_tokens(product))] for i, product in catalog.items())
        db.executemany(f"insert into goods values (?{', ?' * len(WEIGHTS)})", rows)
        db.execute("insert into goods(goods) values ('optimize')")
        db.commit()

    def _connection(self) -> sqlite3.Connection:
        if not hasattr(self._local, "db"):
            self._local.db = sqlite3.connect(self._path)
        return self._local.db

    def search(self, query: str, limit: int = RESULT_LIMIT) -> list[str]:
        """Ids of the best products, as FTS5 is meant to be asked: ranked inside the table."""
        words = unique_tokens(query)
        if not words:
            return []
        sql = "select id from goods where goods match ? and rank match ? order by rank limit ?"
        return [row[0] for row in self._connection().execute(sql, [_any_of(words), self._bm25, limit])]

    def scores(self, query: str) -> dict[str, float]:
        """Score of every product that shares a word with the query; higher is better."""
        words = unique_tokens(query)
        if not words:
            return {}
        sql = f"select id, -{self._bm25.replace('bm25(', 'bm25(goods, ')} from goods where goods match ?"
        return dict(self._connection().execute(sql, [_any_of(words)]))


def _any_of(words: Sequence[str]) -> str:
    return " OR ".join(f'"{word}"' for word in words)


def explain_difference(ours: Sequence[str], oracle: dict[str, float], limit: int = RESULT_LIMIT, tolerance: float = 1e-9) -> str:
    """Why `ours` is not the oracle's list by (score, id): "" when it is, else "rounding" or "wrong".

    "rounding": every place holds a product whose score is that of the place up to `tolerance` relative. Sums of the same numbers in another order
    differ in the last bit, and so can turn a tie, which ids decide, into a difference.
    """
    expected = sorted(oracle, key=lambda i: (-oracle[i], i))[:limit]
    if list(ours) == expected:
        return ""
    places = zip(ours, expected, strict=False)
    distinct = len(set(ours)) == len(ours) == len(expected)
    near = distinct and all(i in oracle and abs(oracle[i] - oracle[e]) <= tolerance * max(abs(oracle[e]), 1e-6) for i, e in places)
    return "rounding" if near else "wrong"
