"""WebShop: a JSON array of products, and objects by product id that hold attributes or instructions.

The files may be given in any order; an array is products, and the entries of an object tell what they are. The objects are kept in memory
while the products stream.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shop_env.catalog import Product
from shop_env.errors import InvalidSource
from shop_env.importers.fields import list_price, options_of, text_of, texts_of
from shop_env.importers.json_stream import Unreadable, array_elements, first_character, object_items
from shop_env.importers.report import Report, Where
from shop_env.importers.rows import TaskFormat, build_product, build_tasks, product_id
from shop_env.tasks import Task

_LONGEST_ID = 10
_FORMAT = TaskFormat(prefix="webshop", attributes="instruction_attributes", options="instruction_options")


def read(paths: Sequence[Path], report: Report) -> tuple[dict[str, Product], list[Task]]:
    """Products by id in the order of the sources, and the tasks in the order of the instructions."""
    kinds = {path: first_character(path) for path in paths}
    arrays = [path for path, first in kinds.items() if first == "["]
    if not arrays:
        raise InvalidSource(f"no file of products among {[path.name for path in paths]}: give the JSON array of products as well")
    attributes: dict[str, Any] = {}
    instructions: list[tuple[Where, str, list[Any]]] = []
    for path, first in kinds.items():
        if first != "[":
            _read_entries(path, report, attributes, instructions)
    products: dict[str, Product] = {}
    for path in arrays:
        for number, row in enumerate(array_elements(path)):
            report.num_rows += 1
            where = Where(path.name, number)
            name = product_id(report, where, row, products, _LONGEST_ID)
            product = build_product(report, where, _fields(report, name, row, attributes.get(name))) if name else None
            if product is not None:
                products[product.id] = product
    return products, [task for where, name, records in instructions for task in _tasks(report, where, name, records, products)]


def _read_entries(path: Path, report: Report, attributes: dict[str, Any], instructions: list[tuple[Where, str, list[Any]]]) -> None:
    """Sorts a file's entries: an object with "attributes" belongs to a product, a list holds its instructions."""
    for number, (name, entry) in enumerate(object_items(path)):
        report.num_rows += 1
        where = Where(path.name, number)
        if isinstance(entry, list):
            instructions.append((where, text_of(name), entry))
        elif isinstance(entry, dict) and "attributes" in entry:
            attributes.setdefault(text_of(name), entry["attributes"])
        elif isinstance(entry, Unreadable):
            report.reject(where, "row", entry.text, "not JSON", entry.problem)
        else:
            report.reject(where, "row", name, "neither attributes nor instructions", f"{entry!r:.80}")


def _fields(report: Report, name: str, row: dict[str, Any], attributes: Any) -> dict[str, Any]:
    def note(what: str) -> None:
        report.repaired[what] += 1

    path = tuple(filter(None, map(text_of, text_of(row.get("product_category")).split("›"))))
    images = texts_of(row.get("images"), note, "image")
    options = options_of(row.get("customization_options"), note)
    return {
        "id": name,
        "title": text_of(row.get("name")) or text_of(row.get("title")),
        "brand": text_of(row.get("brand")),
        "category": path or tuple(filter(None, (text_of(row.get("category")), text_of(row.get("query"))))),
        "attributes": texts_of(attributes, note, "attribute"),
        "options": {axis.lower(): values for axis, values in options.items()},
        "price": list_price(row.get("pricing"), note),
        "image": images[0] if images else None,
        "bullets": (*texts_of(row.get("small_description"), note, "bullet"), *texts_of(row.get("full_description"), note, "description")),
    }


def _tasks(report: Report, where: Where, name: str, records: list[Any], products: dict[str, Product]) -> list[Task]:
    product = products.get(name)
    if product is None:
        report.reject(where, "task", name, "its product is not in the catalogue", f"{len(records)} instructions")
        return []
    return build_tasks(report, where, _FORMAT, records, product)
