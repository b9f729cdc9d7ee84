"""From the files of a public data set to a world directory, with the report of what was left out beside it."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shop_env.catalog import Catalog
from shop_env.errors import InvalidSource
from shop_env.importers import shopsimulator, webshop
from shop_env.importers.report import Report
from shop_env.pricing import variant_price
from shop_env.reward import score
from shop_env.storage import canonical_json
from shop_env.tasks import Task, World, components, split_tasks

READERS = {"shopsimulator": shopsimulator.read, "webshop": webshop.read}
REJECTED_FILE = "rejected.jsonl"
IMPORT_FILE = "import.json"


@dataclasses.dataclass(frozen=True)
class Imported:
    """A world, the rows left out of it, and the facts to be stored with it."""

    world: World
    report: Report
    facts: Mapping[str, Any]

    def save(self, directory: str | Path) -> None:
        """Writes the world with two more files: the rejected rows, and the facts with counts by reason."""
        extra = {REJECTED_FILE: self.report.to_bytes(), IMPORT_FILE: (canonical_json(self.facts) + "\n").encode()}
        self.world.save(directory, extra)


def import_files(form: str, paths: Sequence[Path], split_sizes: Mapping[str, int], seed: int) -> Imported:
    """Reads the files; the result depends on their names (without folders), content and order, and on the arguments.

    Args:
      form: a key of `READERS`.
      paths: the files, plain or compressed.
      split_sizes: split name -> tasks. If any task has a persona, only tasks with one are split; the others can be opened by id.
      seed: of the splits.

    Raises:
      InvalidSource: a file cannot be read, or holds no product.
      InvalidTask: the tasks cannot be split into these sizes.
    """
    report = Report()
    sources = [{"name": path.name, "sha256": _file_digest(path)} for path in paths]
    products, tasks = READERS[form](paths, report)
    if not products:
        raise InvalidSource(f"no usable product in {[path.name for path in paths]}; rejected rows: {report.counts()['rejected']}")
    catalog = Catalog(products.values())
    splittable = [task for task in tasks if task.persona] or tasks
    splits = split_tasks(splittable, split_sizes, seed) if split_sizes else {}
    world = World(catalog, {task.id: task for task in tasks}, {name: tuple(ids) for name, ids in splits.items()})
    groups = [len(group) for group in components(splittable)]
    facts = {
        "format": form,
        "sources": sources,
        "seed": seed,
        "rows": report.num_rows,
        "products": len(catalog),
        "tasks": len(tasks),
        "tasks with a persona": sum(bool(task.persona) for task in tasks),
        "tasks with a budget": sum(task.goal.price_ceiling is not None for task in tasks),
        "tasks that their own product meets": sum(met_by_own_product(catalog, task) for task in tasks),
        "splits": {name: len(ids) for name, ids in splits.items()},
        "linked groups": len(groups),
        "largest linked group": max(groups, default=0),
        **report.counts(),
    }
    return Imported(world, report, facts)


def met_by_own_product(catalog: Catalog, task: Task) -> bool:
    """Whether some selection of the task's own product succeeds (another product may succeed where this is False)."""
    product = catalog[task.goal.product_id]
    choices = [{axis: value for axis, value in task.goal.options.items() if axis in product.options}]
    axis = product.price_axis
    if axis is not None and axis not in choices[0]:
        choices = [{**choices[0], axis: value} for value in product.options[axis]]
    return any(score(product, chosen, variant_price(product, chosen), task.goal, product).success for chosen in choices)


def _file_digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as e:
        raise InvalidSource(f"{path}: unreadable ({e.strerror})") from None
