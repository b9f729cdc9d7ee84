"""What the two formats share: a product from a row's fields, and a task from an instruction record."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from shop_env.budget import stated_budget
from shop_env.catalog import Product
from shop_env.errors import InvalidProduct
from shop_env.importers.fields import goal_options, plain, prices_of, text_of, texts_of
from shop_env.importers.report import Report, Where
from shop_env.tasks import Goal, Task


def product_id(report: Report, where: Where, row: Any, known: Mapping[str, Product], longest: int) -> str | None:
    """The id of a product row that may be built, or None after noting why not."""
    if not isinstance(row, Mapping):
        problem = getattr(row, "problem", None)
        name = getattr(row, "text", "")
        report.reject(where, "row", name, "not JSON" if problem else "not an object", problem or f"{row!r:.80}")
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


def build_task(report: Report, where: Where, prefix: str, index: int, record: Any, product: Product, persona: Any, names: Sequence[str]) -> Task | None:
    """The task of one instruction record, or None after noting why not.

    Args:
      report: takes the notes.
      where: the place of the record's row.
      prefix: of the task's id; 24 hexadecimal digits of a sha256 of product, index and instruction follow.
      index: of the record among its product's.
      record: the record.
      product: its product.
      persona: as the source has it.
      names: the record's keys of the target attributes and of the target options.
    """
    name = f"{product.id}#{index}"
    if not isinstance(record, Mapping):
        report.reject(where, "task", name, "not an object", f"{record!r:.80}")
        return None
    full = text_of(record.get("instruction"))
    note = report.repaired.update
    attributes = texts_of(record.get(names[0]), lambda what: note([what]), "target attribute")
    if not full or not attributes:
        report.reject(where, "task", name, "no target attributes" if full else "no instruction", full)
        return None
    if persona is not None and not isinstance(persona, Mapping):
        note(["persona that is no object ignored"])
        persona = None
    public = plain(persona or {}) or {}
    simple = text_of(record.get("instruction_simple")) or full
    goal = Goal(
        product_id=product.id,
        attributes=attributes,
        options=goal_options(record.get(names[1]), product.options, lambda what: note([what])),
        price_ceiling=_ceiling(record.get("price_upper"), simple, full),
    )
    uid = json.dumps([product.id, index, str(record["instruction"])], ensure_ascii=False, separators=(",", ":"))
    digest = hashlib.sha256(uid.encode("utf-8", "surrogatepass")).hexdigest()
    return Task(f"{prefix}-{digest[:24]}", simple, full, public, goal, _user_id(public))


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
