"""ShopSimulator: one JSON array of products, each with its instructions and the persona of its shopper."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shop_env.catalog import Product
from shop_env.importers.fields import list_price, options_of, text_of, texts_of
from shop_env.importers.json_stream import array_elements
from shop_env.importers.report import Report, Where
from shop_env.importers.rows import TaskFormat, build_product, build_tasks, product_id
from shop_env.tasks import Task

_LONGEST_ID = 20
_FORMAT = TaskFormat(prefix="shopsim", attributes="attributes", options="instruction_options")


def read(paths: Sequence[Path], report: Report) -> tuple[dict[str, Product], list[Task]]:
    """Products by id and their tasks, in the order of the sources. The first of several products with one id wins."""
    products: dict[str, Product] = {}
    tasks: list[Task] = []
    for path in paths:
        for number, row in enumerate(array_elements(path)):
            report.num_rows += 1
            where = Where(path.name, number)
            name = product_id(report, where, row, products, _LONGEST_ID)
            product = build_product(report, where, _fields(report, name, row)) if name else None
            if product is not None:
                products[product.id] = product
                tasks += _tasks(report, where, row, product)
    return products, tasks


def _fields(report: Report, name: str, row: dict[str, Any]) -> dict[str, Any]:
    def note(what: str) -> None:
        report.repaired[what] += 1

    images = texts_of(row.get("images"), note, "image")
    return {
        "id": name,
        "title": text_of(row.get("title")),
        "brand": text_of(row.get("shop_name")),
        "category": tuple(filter(None, map(text_of, text_of(row.get("category")).split("›")))),
        "attributes": texts_of(row.get("attribute"), note, "attribute"),
        "options": options_of(row.get("customization_options"), note),
        "price": list_price(row.get("pricing"), note),
        "image": images[0] if images else None,
    }


def _tasks(report: Report, where: Where, row: dict[str, Any], product: Product) -> list[Task]:
    records = row.get("instructions")
    if records is not None and not isinstance(records, list):
        report.reject(where, "task", product.id, "instructions are no list", f"{records!r:.80}")
        return []
    if records and row.get("user_persona") is None:
        report.repaired["no persona"] += 1
    return build_tasks(report, where, _FORMAT, records or [], product, row.get("user_persona"))
