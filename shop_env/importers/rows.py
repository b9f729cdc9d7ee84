"""What the two formats share: a product from a row's fields, and a task from an instruction record."""

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from shop_env.budget import stated_budget
from shop_env.catalog import Product
from shop_env.errors import InvalidProduct
from shop_env.importers.fields import goal_options, plain, prices_of, text_of, texts_of
from shop_env.importers.json_stream import Unreadable
from shop_env.importers.report import Report, Where
from shop_env.tasks import Goal, Task


def product_id(report: Report, where: Where, row: Any, known: Mapping[str, Product], longest: int) -> str | None:
    """The id of a product row that may be built, or None after noting why not."""
    if isinstance(row, Unreadable):
        report.reject(where, "row", row.text, "not JSON", row.problem)
        return None
    if not isinstance(row, Mapping):
        report.reject(where, "row", "", "not an object", f"{row!r:.80}")
        return None
    name = text_of(row.get("asin"))
    if not name:
        reason = "no id"
    elif len(name) > longest:
        reason = f"id longer than {longest} characters"
    elif name in known:
        reason = "duplicate id"
    else:
        return name
    report.reject(where, "product", name, reason, text_of(row.get("title") or row.get("name")))
    return None


def build_product(report: Report, where: Where, fields: Mapping[str, Any]) -> Product | None:
    """The product, or None after noting why not: a price on two axes, or another broken rule of the catalogue."""
    priced = [axis for axis, values in fields["options"].items() if len({round(p, 2) for p in values.values() if p is not None}) > 1]
    if len(priced) > 1:
        report.reject(where, "product", fields["id"], "price varies on two or more axes", ", ".join(priced))
        return None
    if not fields["title"]:
        report.reject(where, "product", fields["id"], "no title")
        return None
    try:
        return Product(**fields)
    except InvalidProduct as e:
        report.reject(where, "product", fields["id"], "breaks a rule of the catalogue", e.reason)
        return None


@dataclasses.dataclass(frozen=True)
class TaskFormat:
    """How a data set names what a task consists of.

    Attributes:
      prefix: of task ids; 24 hexadecimal digits of a sha256 of product, index and instruction follow.
      attributes: an instruction record's key of the target attributes.
      options: its key of the target options.
    """

    prefix: str
    attributes: str
    options: str


def build_tasks(report: Report, where: Where, form: TaskFormat, records: Sequence[Any], product: Product, persona: Any = None) -> list[Task]:
    """The tasks of a product's instruction records; those that make none are noted. `persona` is as the source has it."""
    if persona is not None and not isinstance(persona, Mapping):
        report.repaired["persona that is no object ignored"] += 1
        persona = None
    public = plain(persona or {}) or {}
    built = (_build_task(report, where, form, i, record, product, public) for i, record in enumerate(records))
    return [task for task in built if task is not None]


def _build_task(report: Report, where: Where, form: TaskFormat, index: int, record: Any, product: Product, persona: dict[str, Any]) -> Task | None:
    def note(what: str) -> None:
        report.repaired[what] += 1

    name = f"{product.id}#{index}"
    if not isinstance(record, Mapping):
        report.reject(where, "task", name, "not an object", f"{record!r:.80}")
        return None
    full = text_of(record.get("instruction"))
    attributes = texts_of(record.get(form.attributes), note, "target attribute")
    if not full or not attributes:
        report.reject(where, "task", name, "no target attributes" if full else "no instruction", full)
        return None
    simple = text_of(record.get("instruction_simple")) or full
    goal = Goal(
        product_id=product.id,
        attributes=attributes,
        options=goal_options(record.get(form.options), product.options, note),
        price_ceiling=_ceiling(record.get("price_upper"), simple, full),
    )
    uid = json.dumps([product.id, index, str(record["instruction"])], ensure_ascii=False, separators=(",", ":"))
    digest = hashlib.sha256(uid.encode("utf-8", "surrogatepass")).hexdigest()
    return Task(f"{form.prefix}-{digest[:24]}", simple, full, persona, goal, _user_id(persona))


def _ceiling(given: Any, simple: str, full: str) -> float | None:
    """The annotated ceiling where the source has one, else what the short or the full instruction states."""
    if prices := prices_of(given):
        return round(max(prices), 2)
    stated = stated_budget(simple)
    return stated if stated is not None else stated_budget(full)


def _user_id(persona: Mapping[str, Any]) -> str:
    """Stray commas are cut off: they are an artefact, and would make two users of one."""
    for key, value in persona.items():
        if key.casefold().replace(" ", "").replace("_", "") in ("userid", "用户id"):
            return text_of(value).strip(",， ")
    return ""
