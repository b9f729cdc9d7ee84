"""The shop's search against SQLite FTS5 with the same fields and weights: the same ranking, how much faster, and how good it is.

    python benchmarks/bench_search.py [--catalogue DIR] [--queries 400]

Random queries of one to six words of one product each. Equal means FTS5's top 150 in order of (score, id); the one exception, counted apart, is two
products whose scores differ by less than 1e-9 of themselves, which rounding may order either way. Latencies: CPU time of one thread, ours without its
memory of earlier queries. Both sides answer each query in turn, which the target is about: FTS5 has then just filled the processor's caches with its
own data. A second pair of rows has them answer 20 queries at a time. Quality: the rank at which a task's product is found when its instruction is
the query.
"""

import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import shop_world
from peers.fts5 import Fts5Index, explain_difference

from shop_env.search import RESULT_LIMIT, Index
from shop_env.tasks import World
from shop_env.text import unique_tokens

SPEEDUP = 40.0
_BLOCK = 20


def _seconds(call: Callable[[], object]) -> float:
    start = time.thread_time()
    call()
    return time.thread_time() - start


def _latencies(index: Index, fts5: Fts5Index, queries: Sequence[str], block: int) -> tuple[list[float], list[float]]:
    ours, theirs = [], []
    for first in range(0, len(queries), block):
        part = queries[first : first + block]
        ours += [_seconds(lambda query=query: index.rank(tuple(unique_tokens(query)))) for query in part]
        theirs += [_seconds(lambda query=query: fts5.search(query)) for query in part]
    return ours, theirs


def _quality(world: World, index: Index) -> None:
    tasks = [world.tasks[i] for ids in world.splits.values() for i in ids]
    print(f"\n{'query: instruction':20s} {'recall@1':>9s} {'@20':>7s} {f'@{RESULT_LIMIT}':>7s} {'MRR':>7s}   ({len(tasks)} tasks)")
    for name, field in (("simple", "instruction"), ("full", "full_instruction")):
        ranks = []
        for task in tasks:
            found = index.search(getattr(task, field))
            ranks.append(found.index(task.goal.product_id) + 1 if task.goal.product_id in found else None)
        recall = [sum(r is not None and r <= k for r in ranks) / len(ranks) for k in (1, 20, RESULT_LIMIT)]
        reciprocal = sum(1 / r for r in ranks if r) / len(ranks)
        print(f"{name:20s} {recall[0]:9.3f} {recall[1]:7.3f} {recall[2]:7.3f} {reciprocal:7.3f}")


def main() -> int:
    parser = shop_world.parser(__doc__)
    parser.add_argument("--queries", type=int, default=400)
    arguments = parser.parse_args()
    world = shop_world.load(arguments)
    ids = list(world.catalog)
    rng = random.Random(0)
    queries = [shop_world.random_query(rng, world.catalog, ids, rng.randint(1, 6)) for _ in range(arguments.queries)]
    start = time.perf_counter()
    index = Index(world.catalog)
    built = time.perf_counter() - start
    fts5 = Fts5Index(world.catalog)
    print(f"{len(ids)} products, {len(queries)} queries, {len(set(queries))} of them different; index built in {built:.2f} s")

    differences = [explain_difference(index.search(query), fts5.scores(query)) for query in queries]
    wrong, rounding = differences.count("wrong"), differences.count("rounding")
    print(f"top {RESULT_LIMIT}: {differences.count('')} equal, {rounding} equal up to rounding, {wrong} different")

    _latencies(index, fts5, queries[:20], 1)  # warm-up
    print(f"\n{'CPU time, us':34s} {'median':>8s} {'p99':>8s}")
    ratios = {}
    for how, block in (("in turn", 1), (f"{_BLOCK} at a time", _BLOCK)):
        sides = dict(zip(("this index", "FTS5"), _latencies(index, fts5, queries, block), strict=True))
        for name, seconds in sides.items():
            print(f"{name + ', ' + how:34s} {statistics.median(seconds) * 1e6:8.0f} {statistics.quantiles(seconds, n=100)[98] * 1e6:8.0f}")
        ratios[block] = statistics.median(sides["FTS5"]) / statistics.median(sides["this index"])
    _quality(world, index)

    ratio = ratios[1]
    print(f"\n{_BLOCK} queries at a time: {ratios[_BLOCK]:.1f} x")
    met = ratio >= SPEEDUP and wrong == 0
    print(f"search ratio={ratio:.1f} target={SPEEDUP:g} wrong={wrong} {'met' if met else 'missed'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
