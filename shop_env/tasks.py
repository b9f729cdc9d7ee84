"""Tasks, their hidden goals, leak-free splits, and the bundle of all that a shop serves."""

import dataclasses
import json
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from shop_env import storage
from shop_env.catalog import PRODUCTS_FILE, Catalog
from shop_env.errors import InvalidProduct, InvalidTask, InvalidWorld
from shop_env.text import norm

TASKS_FILE = "tasks.jsonl"
SPLITS_FILE = "splits.json"
SPLIT_SIZES = {"train": 3726, "validation": 400, "test": 400}  # of the public experiment
MAX_HELD_OUT_COMPONENT = 20  # larger families of tasks only go to the largest split


@dataclasses.dataclass(frozen=True)
class Goal:
    """What a purchase is scored against; never shown to an agent.

    Attributes:
      product_id: a product that meets everything. Others may, too.
      attributes: targets looked for among the purchased product's attributes and text.
      options: axis -> value targets.
      price_ceiling: the budget that the task states, or None.
    """

    product_id: str
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    price_ceiling: float | None

    def __post_init__(self):
        options, ceiling, where = self.options, self.price_ceiling, f"goal for product {self.product_id!r:.80}"
        texts = [self.product_id, *self.attributes, *options, *options.values()] if isinstance(options, Mapping) else [options]
        if not all(isinstance(text, str) for text in texts) or not isinstance(options, Mapping):
            raise InvalidTask(f"{where}: product_id and attributes must be strings, options an object of strings")
        if ceiling is not None and (isinstance(ceiling, bool) or not isinstance(ceiling, int | float) or not 0 <= ceiling < math.inf):
            raise InvalidTask(f"{where}: price_ceiling must be a finite number >= 0 or None, got {ceiling!r}")

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "attributes": list(self.attributes), "options": dict(self.options)}


@dataclasses.dataclass(frozen=True)
class Task:
    """One errand. `instruction` and `persona` are public; `full_instruction` and `goal` are not."""

    id: str
    instruction: str
    full_instruction: str
    persona: Mapping[str, Any]
    goal: Goal
    user_id: str = ""

    def __post_init__(self):
        if not isinstance(self.id, str) or not self.id or not isinstance(self.instruction, str) or not self.instruction.strip():
            raise InvalidTask(f"task {self.id!r}: needs an id and an instruction")
        if not isinstance(self.full_instruction, str) or not isinstance(self.user_id, str) or not isinstance(self.persona, Mapping):
            raise InvalidTask(f"task {self.id!r}: full_instruction and user_id must be strings, persona an object")
        try:
            storage.canonical_json(self.to_json()).encode()
        except (ValueError, TypeError, RecursionError) as e:  # NaN, half a surrogate pair, a value that JSON does not have
            raise InvalidTask(f"task {self.id!r}: cannot be stored as JSON ({e}); give texts, finite numbers, lists and objects") from None

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "persona": dict(self.persona), "goal": self.goal.to_json()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Task":
        try:
            goal = record["goal"]
            return cls(**{**record, "goal": Goal(**{**goal, "attributes": tuple(goal["attributes"])})})
        except (TypeError, KeyError) as e:
            raise InvalidTask(f"task {record.get('id')!r}: malformed record ({e})") from None

    def links(self) -> list[tuple[str, str]]:
        """What must not be shared between splits: product, instructions, persona, user. Blank ones link nothing."""
        links = [("product", self.goal.product_id), ("instruction", norm(self.instruction)), ("full", norm(self.full_instruction))]
        links.append(("persona", storage.canonical_json(dict(self.persona)) if self.persona else ""))
        links.append(("user", norm(self.user_id).strip(", ")))
        return [link for link in links if link[1]]


def components(tasks: Sequence[Task]) -> list[list[str]]:
    """Connected components of tasks that share a link, in order of their first task."""
    parent = list(range(len(tasks)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[tuple[str, str], int] = {}
    for i, task in enumerate(tasks):
        for link in task.links():
            a, b = root(first.setdefault(link, i)), root(i)
            parent[max(a, b)] = min(a, b)
    groups: dict[int, list[str]] = {}
    for i, task in enumerate(tasks):
        groups.setdefault(root(i), []).append(task.id)
    return list(groups.values())


def _exact_subset(sizes: Sequence[int], total: int) -> list[int] | None:
    """Indices whose sizes sum to `total`, preferring early ones; None when there are none. Subset sum over bit sets."""
    if not 0 <= total <= sum(sizes):
        return None
    reachable = [1]  # bit s of reachable[i]: some of the first i sizes sum to s
    limit = (1 << (total + 1)) - 1
    for size in sizes:
        reachable.append((reachable[-1] | reachable[-1] << size) & limit)
    if not reachable[-1] >> total & 1:
        return None
    chosen = []
    for i in range(len(sizes) - 1, -1, -1):
        if not reachable[i] >> total & 1:
            chosen.append(i)
            total -= sizes[i]
    return chosen[::-1]


def split_tasks(tasks: Iterable[Task], sizes: Mapping[str, int], seed: int) -> dict[str, list[str]]:
    """Splits of exactly the asked sizes that share no product, instruction, persona or user.

    Small splits are filled first, from components of at most MAX_HELD_OUT_COMPONENT tasks; the largest split is filled last. Tasks beyond
    the sum of the sizes are left out.

    Args:
      tasks: in any order; the result depends only on their content and the seed.
      sizes: split name -> number of tasks.
      seed: of the shuffle.

    Returns:
      Split name -> task ids in shuffled order, in the order of `sizes`.
    """
    tasks = sorted(tasks, key=lambda t: t.id)
    if len({t.id for t in tasks}) < len(tasks):
        raise InvalidTask("task ids must be unique")
    pool = components(tasks)
    rng = random.Random(seed)
    rng.shuffle(pool)
    order = sorted(reversed(list(sizes)), key=lambda name: sizes[name])  # of equal sizes, the first named counts as the larger
    splits = {}
    for name in order:
        candidates = [i for i, c in enumerate(pool) if name == order[-1] or len(c) <= MAX_HELD_OUT_COMPONENT]
        picked = _exact_subset([len(pool[i]) for i in candidates], sizes[name])
        if picked is None:
            largest = max((len(c) for c in pool), default=0)
            raise InvalidTask(
                f"split {name!r}: no whole components sum to {sizes[name]} tasks; {sum(map(len, pool))} tasks in {len(pool)} components "
                f"are left, the largest has {largest}; ask for fewer tasks or make more"
            )
        taken = {candidates[i] for i in picked}
        ids = [task_id for i in sorted(taken) for task_id in pool[i]]
        rng.shuffle(ids)
        splits[name] = ids
        pool = [c for i, c in enumerate(pool) if i not in taken]
    return {name: splits[name] for name in sizes}


def _read_splits(data: bytes) -> dict[str, tuple[str, ...]]:
    try:
        splits = json.loads(data)
        if all(isinstance(ids, list) and all(isinstance(i, str) for i in ids) for ids in splits.values()):
            return {name: tuple(ids) for name, ids in splits.items()}
    except (ValueError, AttributeError, RecursionError):
        pass
    raise InvalidWorld(f"{SPLITS_FILE}: expected a JSON object of lists of task ids, got {data[:80]!r}")


@dataclasses.dataclass(frozen=True)
class World:
    """All that a shop serves: the catalogue, the tasks by id, and named splits of task ids.

    Invariants: every goal's product is in the catalogue; every split lists known tasks; no task is in two splits.
    """

    catalog: Catalog
    tasks: Mapping[str, Task]
    splits: Mapping[str, tuple[str, ...]]

    def __post_init__(self):
        object.__setattr__(self, "splits", {name: tuple(ids) for name, ids in self.splits.items()})
        for task_id, task in self.tasks.items():
            if task_id != task.id:
                raise InvalidWorld(f"task {task.id!r} is filed under {task_id!r}")
            if task.goal.product_id not in self.catalog:
                raise InvalidWorld(f"task {task_id!r}: its product {task.goal.product_id!r} is not in the catalogue")
        listed = [task_id for ids in self.splits.values() for task_id in ids]
        if unknown := [task_id for task_id in listed if task_id not in self.tasks]:
            raise InvalidWorld(f"splits list {len(unknown)} unknown tasks, first {unknown[0]!r}")
        if len(set(listed)) < len(listed):
            raise InvalidWorld("a task is listed twice in the splits; each task belongs to at most one")

    def save(self, directory: str | Path, extra: Mapping[str, bytes] | None = None) -> None:
        """Writes the canonical files, and `extra` ones (name -> content) that the manifest vouches for as well."""
        files = {
            PRODUCTS_FILE: self.catalog.to_bytes(),
            TASKS_FILE: storage.json_lines(task.to_json() for task in self.tasks.values()),
            SPLITS_FILE: (json.dumps({name: list(ids) for name, ids in self.splits.items()}, ensure_ascii=False) + "\n").encode(),
            **(extra or {}),
        }
        storage.write_directory(directory, "world", files, {"num_products": len(self.catalog), "num_tasks": len(self.tasks)})

    @classmethod
    def load(cls, directory: str | Path) -> "World":
        files = storage.read_directory(directory, "world", [PRODUCTS_FILE, TASKS_FILE, SPLITS_FILE])
        try:
            tasks = [Task.from_json(row) for row in storage.read_rows(files[TASKS_FILE], TASKS_FILE)]
            if len({task.id for task in tasks}) < len(tasks):
                raise InvalidTask("task ids must be unique")
            splits = _read_splits(files[SPLITS_FILE])
            return cls(Catalog.from_bytes(files[PRODUCTS_FILE]), {task.id: task for task in tasks}, splits)
        except (InvalidProduct, InvalidTask) as e:
            raise InvalidWorld(f"{directory}: {e}") from None
