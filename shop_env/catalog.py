"""Products and the catalogue. A product is checked and its text cleaned where it is built, so nothing later has to."""

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from shop_env import storage
from shop_env.errors import InvalidProduct, InvalidWorld
from shop_env.text import clean, norm

_ID = re.compile(r'[^\s"<>|\[\]=]{1,64}')
PRODUCTS_FILE = "products.jsonl"

Options = Mapping[str, Mapping[str, float | None]]


def _price(product_id: str, value: Any, where: str) -> float | None:
    """Rounded to cents, so that the price shown is the price compared."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e9:
        raise InvalidProduct(product_id, f"{where} must be a finite number in [0, 1e9) or None, got {value!r}")
    return round(float(value), 2)


def _texts(product_id: str, values: Any, where: str) -> tuple[str, ...]:
    if isinstance(values, str) or not all(isinstance(v, str) for v in values):
        raise InvalidProduct(product_id, f"{where} must be a sequence of strings, got {values!r:.80}")
    return tuple(dict.fromkeys(text for text in map(clean, values) if text))


@dataclasses.dataclass(frozen=True)
class Product:
    """One product, possibly with variants.

    Attributes:
      id: no spaces, quotes, brackets, `|` or `=`.
      title: shown everywhere.
      brand: searched, not shown apart from the title.
      category: path from the root; compared node by node in the reward.
      attributes: the facts that the product page lists; blank ones are dropped.
      options: axis -> value -> price or None. At most one axis may change the price.
      price: list price, or None when none can be verified.
      image: address or None.
      model: model name, searched only.
      bullets: further text, searched and matched but not shown.
    """

    id: str
    title: str
    brand: str
    category: tuple[str, ...]
    attributes: tuple[str, ...]
    options: Options
    price: float | None
    image: str | None = None
    model: str = ""
    bullets: tuple[str, ...] = ()

    def __post_init__(self):
        if not isinstance(self.id, str) or not _ID.fullmatch(self.id):
            raise InvalidProduct(str(self.id), 'an id has 1 to 64 characters, none of them a space or one of "<>|[]=')
        for name in ("title", "brand", "model"):
            if not isinstance(getattr(self, name), str):
                raise InvalidProduct(self.id, f"{name} must be a string, got {getattr(self, name)!r:.80}")
            object.__setattr__(self, name, clean(getattr(self, name)))
        if not self.title:
            raise InvalidProduct(self.id, "title is blank")
        for name in ("category", "attributes", "bullets"):
            object.__setattr__(self, name, _texts(self.id, getattr(self, name), name))
        object.__setattr__(self, "price", _price(self.id, self.price, "price"))
        object.__setattr__(self, "options", self._clean_options())
        changing = [axis for axis, values in self.options.items() if len(_finite(values)) > 1]
        if len(changing) > 1:
            raise InvalidProduct(self.id, f"price varies on {len(changing)} axes {changing}; at most one axis may change the price")

    def _clean_options(self) -> dict[str, dict[str, float | None]]:
        options = {}
        for raw_axis, raw_values in self.options.items():
            axis = clean(raw_axis)
            values = {clean(value): _price(self.id, price, f"price of {raw_axis}={value}") for value, price in raw_values.items()}
            if not axis or not values or not all(values):
                raise InvalidProduct(self.id, f"axis {raw_axis!r}: names and values may not be blank, and there must be a value")
            if len({norm(value) for value in values}) < len(raw_values):
                raise InvalidProduct(self.id, f"axis {axis!r} has values that differ only in case, width or spacing")
            options[axis] = values
        if len({norm(axis) for axis in options}) < len(self.options):
            raise InvalidProduct(self.id, "axes differ only in case, width or spacing")
        return options

    @functools.cached_property
    def price_axis(self) -> str | None:
        """The axis with more than one distinct price, if there is one."""
        return next((axis for axis, values in self.options.items() if len(_finite(values)) > 1), None)

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back to an equal product."""
        record = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in record.items()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> "Product":
        known = {f.name for f in dataclasses.fields(cls)}
        if unknown := set(record) - known:
            raise InvalidProduct(str(record.get("id")), f"unknown fields {sorted(unknown)}")
        try:
            # JSON has lists where a product has tuples; anything else of a wrong type is left as it is, to be refused.
            fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in record.items()}
            return cls(**fields)
        except (TypeError, AttributeError) as e:
            raise InvalidProduct(str(record.get("id")), f"malformed record ({e})") from None


def _finite(values: Mapping[str, float | None]) -> set[float]:
    return {price for price in values.values() if price is not None}


class Catalog(Mapping[str, Product]):
    """Read-only id -> product, in ascending order of id."""

    def __init__(self, products: Iterable[Product]):
        self._products: dict[str, Product] = {}
        for product in sorted(products, key=lambda p: p.id):
            if product.id in self._products:
                raise InvalidProduct(product.id, "id occurs twice; keep one of the two products")
            self._products[product.id] = product

    def __getitem__(self, product_id: str) -> Product:
        return self._products[product_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._products)

    def __len__(self) -> int:
        return len(self._products)

    def to_bytes(self) -> bytes:
        """The canonical JSON lines."""
        return storage.json_lines(product.to_json() for product in self._products.values())

    @classmethod
    def from_bytes(cls, data: bytes) -> "Catalog":
        return cls(Product.from_json(row) for row in storage.read_rows(data, PRODUCTS_FILE))

    @functools.cached_property
    def hash(self) -> str:
        """sha256 of the canonical JSON lines: equal for equal catalogues on every machine."""
        return storage.digest(self.to_bytes())

    def save(self, directory: str | Path) -> None:
        storage.write_directory(directory, "catalog", {PRODUCTS_FILE: self.to_bytes()}, {"num_products": len(self)})

    @classmethod
    def load(cls, directory: str | Path) -> "Catalog":
        try:
            return cls.from_bytes(storage.read_directory(directory, "catalog", [PRODUCTS_FILE])[PRODUCTS_FILE])
        except InvalidProduct as e:
            raise InvalidWorld(f"{directory}: {e}") from None
