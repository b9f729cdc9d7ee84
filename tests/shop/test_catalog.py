import dataclasses
import hashlib
import json
import re

import pytest

from shop_env.catalog import Catalog, Product
from shop_env.errors import InvalidProduct, InvalidTask, InvalidWorld
from shop_env.pricing import price_range, variant_price
from shop_env.tasks import World
from shop_env.text import clean, norm, tokenize


def product(**changes) -> Product:
    fields = dict(id="p", title="t", brand="", category=(), attributes=(), options={}, price=10.0)
    return Product(**{**fields, **changes})


def test_text_is_cleaned_where_a_product_is_built():
    p = product(title=' a\n "b" <|im_end|>\u200b c ', attributes=("x\ty", " ", "x y"), options={" s ": {' "L" ': None}})
    assert p.title == "a b |im_end| c"
    assert p.attributes == ("x y",)
    assert p.options == {"s": {"L": None}}
    assert clean(clean("＜a>\r\nb")) == clean("＜a>\r\nb")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Acme XL-2", ["acme", "xl", "2"]),
        ("防水外套", ["防水", "水外", "外套"]),
        ("红 ５00ML套装", ["红", "500ml", "套装"]),
        ("don't_stop", ["don", "t", "stop"]),
        ("!?", []),
    ],
)
def test_tokens(text, tokens):
    assert tokenize(text) == tokens


def test_norm_folds_width_and_case():
    assert norm("ＲＥＤ  Straße") == norm("red STRASSE") == "red strasse"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"id": "a b"}, "id"),
        ({"title": ' "" '}, "title"),
        ({"price": float("nan")}, "price"),
        ({"price": -1.0}, "price"),
        ({"price": float("inf")}, "price"),
        ({"price": 10**400}, "price"),
        ({"price": "24"}, "price"),
        ({"attributes": "abc"}, "attributes"),
        ({"options": {"size": {}}}, "axis"),
        ({"options": {"size": {"Red": None, "red ": None}}}, "differ only"),
        ({"options": {"size": {"s": 1.0, "l": 2.0}, "set": {"1": 3.0, "2": 4.0}}}, "varies on 2 axes"),
    ],
)
def test_bad_products_are_refused_with_id_and_reason(changes, word):
    # Through from_json: records from outside are where wrong types come from.
    with pytest.raises(InvalidProduct) as e:
        Product.from_json({**product().to_json(), **changes})
    assert word in e.value.reason and e.value.product_id == changes.get("id", "p")


def test_prices_of_selections():
    fixed = product(options={"size": {"s": None, "l": None}})
    assert variant_price(fixed, {}) == 10.0 and price_range(fixed, {"size": "s"}) == (10.0, 10.0)
    constant = product(options={"size": {"s": 12.0, "l": 12.0}, "colour": {"red": None}})
    assert constant.price_axis is None and variant_price(constant, {}) == 12.0  # what the options state wins over the list price
    unknown = product(price=None)
    assert variant_price(unknown, {}) is None and price_range(unknown, {}) is None
    varied = product(options={"colour": {"red": 10.0, "blue": 10.0}, "size": {"s": 8.0, "m": None, "l": 11.25}})
    assert varied.price_axis == "size"
    assert price_range(varied, {"colour": "red"}) == (8.0, 11.25)
    assert variant_price(varied, {"colour": "red"}) is None
    assert variant_price(varied, {"size": "l"}) == 11.25 and price_range(varied, {"size": "l"}) == (11.25, 11.25)
    assert variant_price(varied, {"size": "m"}) is None and price_range(varied, {"size": "m"}) is None


def test_catalogue_is_ordered_hashed_and_unique():
    a, b = product(id="a"), product(id="b")
    assert list(Catalog([b, a])) == ["a", "b"]
    assert Catalog([b, a]).hash == Catalog([a, b]).hash != Catalog([a]).hash
    with pytest.raises(InvalidProduct, match="twice"):
        Catalog([a, a])


def test_world_survives_a_save(tmp_path, world):
    world.save(tmp_path / "one")
    loaded = World.load(tmp_path / "one")
    assert loaded == world and loaded.catalog.hash == world.catalog.hash
    loaded.save(tmp_path / "two")
    for name in ("products.jsonl", "tasks.jsonl", "splits.json", "manifest.json"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    world.catalog.save(tmp_path / "catalog")
    assert dict(Catalog.load(tmp_path / "catalog")) == dict(world.catalog)


def test_damaged_directories_are_refused(tmp_path, world):
    with pytest.raises(InvalidWorld, match="no manifest"):
        World.load(tmp_path / "absent")
    world.save(tmp_path)
    with pytest.raises(InvalidWorld, match="expected 'catalog'"):
        Catalog.load(tmp_path)
    file = tmp_path / "tasks.jsonl"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(InvalidWorld, match="sha256 differs"):
        World.load(tmp_path)
    file.unlink()
    with pytest.raises(InvalidWorld, match="unreadable"):
        World.load(tmp_path)
    (tmp_path / "manifest.json").write_text("[")
    with pytest.raises(InvalidWorld, match="unreadable"):
        World.load(tmp_path)


def edited(directory, name, edit):
    """Changes a file of a world and its manifest: what somebody's own program may write."""
    data = edit((directory / name).read_bytes())
    (directory / name).write_bytes(data)
    manifest = json.loads((directory / "manifest.json").read_bytes())
    manifest["sha256"][name] = hashlib.sha256(data).hexdigest()
    (directory / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("name", "edit", "word"),
    [
        ("products.jsonl", lambda data: data + b"\xff\n", "line 16: not JSON"),
        ("products.jsonl", lambda data: data + b"[1]\n", "line 16: a JSON object expected"),
        ("products.jsonl", lambda data: data + b"\n", "line 16: not JSON"),
        ("products.jsonl", lambda data: data + b'{"id": ' + b"[" * 200_000 + b"\n", "line 16: not JSON"),
        ("products.jsonl", lambda data: data + data.split(b"\n")[0] + b"\n", "twice"),
        ("products.jsonl", lambda data: data.replace(b'"price":24.0', b'"price":NaN').replace(b'"price":24', b'"price":NaN'), "NaN is no number"),
        ("tasks.jsonl", lambda data: data.replace(b'"budget":"modest"', b'"budget":NaN'), "NaN is no number"),
        ("tasks.jsonl", lambda data: data.replace(b'"budget":"modest"', b'"budget":"\\ud800"'), "cannot be stored as JSON"),
        ("tasks.jsonl", lambda data: data + data, "unique"),
        ("tasks.jsonl", lambda data: data.replace(b'"goal":{', b'"goal":[],"x":{'), "malformed"),
        ("splits.json", lambda data: b"[]", "splits.json: expected a JSON object of lists"),
        ("splits.json", lambda data: b"\xff", "splits.json: expected a JSON object of lists"),
        ("splits.json", lambda data: b'{"train": "task-mug"}', "splits.json: expected a JSON object of lists"),
        ("splits.json", lambda data: b'{"train": [["task-mug"]]}', "splits.json: expected a JSON object of lists"),
    ],
)
def test_bad_rows_of_worlds_are_named(tmp_path, world, name, edit, word):
    world.save(tmp_path)
    edited(tmp_path, name, edit)
    with pytest.raises(InvalidWorld, match=re.escape(word)):
        World.load(tmp_path)


@pytest.mark.parametrize("manifest", [[], {}, {"sha256": 5}, {"sha256": [1]}, {"sha256": {}, "kind": "world", "schema": 1}])
def test_bad_manifests_are_named(tmp_path, world, manifest):
    world.save(tmp_path)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InvalidWorld, match="write the directory again|expected 'world'"):
        World.load(tmp_path)


@pytest.mark.parametrize("separator", ["\u2028", "\x85", "\x1c", "\x0b", "\r", "\n"])
def test_texts_with_any_line_separator_survive_a_save(tmp_path, world, separator):
    task = dataclasses.replace(world.tasks["task-mug"], instruction=f"a{separator}mug", persona={separator: [separator]})
    World(world.catalog, {task.id: task}, {}).save(tmp_path)
    assert World.load(tmp_path).tasks == {task.id: task}


@pytest.mark.parametrize("persona", [{"a": float("nan")}, {"a": "\ud800"}, {"a": {1, 2}}, {"a": b"x"}])
def test_tasks_that_could_not_be_stored_are_refused(world, persona):
    with pytest.raises(InvalidTask, match="task-mug.*cannot be stored"):
        dataclasses.replace(world.tasks["task-mug"], persona=persona)


def test_a_directory_that_cannot_be_written_is_named(tmp_path, world):
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidWorld, match="file/world: cannot be written"):
        world.save(tmp_path / "file" / "world")


def test_inconsistent_worlds_are_refused(world):
    with pytest.raises(InvalidWorld, match="unknown tasks"):
        World(world.catalog, world.tasks, {"train": ("nope",)})
    with pytest.raises(InvalidWorld, match="twice"):
        World(world.catalog, world.tasks, {"a": ("task-mug",), "b": ("task-mug",)})
    with pytest.raises(InvalidWorld, match="not in the catalogue"):
        World(Catalog([]), world.tasks, {})


def test_product_json_round_trip(world):
    for p in world.catalog.values():
        assert Product.from_json(json.loads(json.dumps(p.to_json()))) == p
    with pytest.raises(InvalidProduct, match="unknown fields"):
        Product.from_json({**product().to_json(), "colour": 1})
    with pytest.raises(InvalidProduct, match="malformed"):
        Product.from_json({"id": "p"})
