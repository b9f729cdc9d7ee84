"""Both importers on the hand-made files in fixtures/, whose rows hold every fault that the real files are known for."""

import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shop_env.__main__ import main
from shop_env.catalog import Catalog
from shop_env.errors import InvalidSource, InvalidTask
from shop_env.importers.fields import prices_of
from shop_env.importers.run import import_files
from shop_env.pricing import variant_price
from shop_env.session import Session, Shop
from shop_env.storage import json_lines
from shop_env.tasks import Task, World

FIXTURES = Path(__file__).parent / "fixtures"
SHOPSIM = [FIXTURES / "shopsimulator.json"]
WEBSHOP = [FIXTURES / f"webshop_{name}.json" for name in ("instructions", "items", "attributes")]
SIZES = {"train": 4, "validation": 1, "test": 1}


@pytest.fixture(scope="module")
def shopsim():
    return import_files("shopsimulator", SHOPSIM, SIZES, 0)


@pytest.fixture(scope="module")
def webshop():
    return import_files("webshop", WEBSHOP, {"train": 1, "test": 1}, 0)


def by_product(imported):
    return {(task.goal.product_id, task.full_instruction[:6]): task for task in imported.world.tasks.values()}


def test_rejected_rows_are_listed_with_reasons(shopsim):
    assert [(r["row"], r["kind"], r["reason"]) for r in shopsim.report.rejected] == [
        (1, "product", "duplicate id"),
        (2, "product", "no id"),
        (3, "product", "id longer than 20 characters"),
        (4, "product", "price varies on two or more axes"),
        (7, "row", "not JSON"),
        (8, "product", "no title"),
        (9, "task", "no target attributes"),
        (9, "task", "no instruction"),
        (9, "task", "not an object"),
        (10, "row", "not an object"),
    ]
    assert shopsim.facts["rows"] == 13 and shopsim.facts["products"] == 6 and shopsim.facts["tasks"] == 7
    assert sum(shopsim.facts["rejected"].values()) == 10


def test_products_as_the_public_system_reads_them(shopsim):
    catalog = shopsim.world.catalog
    assert sorted(catalog) == [f"61000000000{i}" for i in (1, 3, 4, 7, 8, 9)]
    jacket = catalog["610000000001"]
    assert jacket.title == "云杉 防水夹克" and jacket.brand == "云杉旗舰店" and jacket.category == ("服装", "户外服装", "夹克")
    assert jacket.attributes == ("防水", "连帽", "可机洗")  # the blank one is gone
    assert jacket.options == {"颜色": {"黑色": 280.0, "深蓝 | 藏青": 320.0}, "尺码": {"xl": 280.0, "l": 280.0}}
    assert jacket.price is None and jacket.image == "https://img.example/1.jpg"  # two list prices are a range
    assert catalog["610000000003"].options == {"规格": {"单只 | 标准": None, "一对 | 标准": None}}  # values that are plain strings
    assert catalog["610000000003"].price == 100.0  # no price given
    assert catalog["610000000004"].options == {"尺寸": {"60*90cm（约12元 | 平方米）": 99.0, "80*120cm": 1199.5}}  # prices as text
    assert catalog["610000000007"].attributes == ("纯棉",) and catalog["610000000007"].options == {"尺码": {"m": 88.0}}
    assert catalog["610000000007"].price == 88.0 and catalog["610000000008"].price == 39.0  # NaN and a negative price are none


def test_the_price_of_a_variant(shopsim):
    catalog = shopsim.world.catalog
    assert variant_price(catalog["610000000001"], {"颜色": "深蓝 | 藏青", "尺码": "l"}) == 320.0  # the price axis decides
    assert variant_price(catalog["610000000001"], {"尺码": "l"}) is None
    assert variant_price(catalog["610000000009"], {"人数": "四人"}) == 400.0  # the one price that the options state
    assert variant_price(catalog["610000000008"], {}) == 39.0  # the list price


def test_tasks_goals_and_budgets(shopsim):
    tasks = by_product(shopsim)
    first = tasks["610000000001", "我想买一件防"]
    assert first.instruction == "想买一件防水夹克，预算300元左右。" and first.goal.price_ceiling == 330.0
    assert first.goal.attributes == ("防水", "连帽") and first.goal.options == {"颜色": "黑色", "尺码": "xl"}
    assert tasks["610000000001", "要一件深蓝色"].goal.price_ceiling == 350.0  # annotated in the file
    assert tasks["610000000001", "要一件深蓝色"].goal.options == {"颜色": "深蓝 | 藏青"}
    assert tasks["610000000003", "买一对真丝枕"].goal.options == {"规格": "一对 | 标准"}
    assert tasks["610000000003", "买一对真丝枕"].persona == {} and tasks["610000000003", "买一对真丝枕"].goal.price_ceiling == 120.0
    assert tasks["610000000004", "想买羊毛地毯"].goal.options == {"option 1": "蓝色"}  # its product lacks it
    assert tasks["610000000004", "想买羊毛地毯"].goal.price_ceiling is None  # a price by area
    assert tasks["610000000007", "买纯棉衬衫，"].goal.price_ceiling == 150.0  # a range, in the full instruction only
    assert tasks["610000000008", "陶瓷马克杯，"].goal.price_ceiling is None  # a lower bound
    assert tasks["610000000009", "双人防水帐篷"].goal.price_ceiling == 500.0
    material = '["610000000001",0,"我想买一件防水连帽的黑色夹克，XL码，预算300元左右。"]'
    assert first.id == "shopsim-" + hashlib.sha256(material.encode()).hexdigest()[:24]


def test_personas_lose_reasoning_and_nan_only(shopsim):
    persona = by_product(shopsim)["610000000001", "我想买一件防"].persona
    assert list(persona) == ["用户ID", "地区信息", "人口属性", "兴趣偏好"]
    assert persona["兴趣偏好"] == {"类目偏好": ["服装"], "商品属性偏好": {"价格区间": "200-400元", "风格": "户外"}}


def test_only_tasks_with_a_persona_are_split_and_linked_ones_stay_together(shopsim):
    splits, tasks = shopsim.world.splits, by_product(shopsim)
    assert {name: len(ids) for name, ids in splits.items()} == SIZES
    home = {task_id: name for name, ids in splits.items() for task_id in ids}
    assert tasks["610000000003", "买一对真丝枕"].id not in home
    assert home[tasks["610000000004", "想买羊毛地毯"].id] == home[tasks["610000000007", "买纯棉衬衫，"].id]  # user "u-77," is user "u-77"
    assert home[tasks["610000000001", "我想买一件防"].id] == home[tasks["610000000001", "要一件深蓝色"].id]
    assert shopsim.facts["linked groups"] == 4 and shopsim.facts["largest linked group"] == 2


def test_webshop_products_and_tasks(webshop):
    catalog = webshop.world.catalog
    sweater = catalog["B000000001"]
    assert sweater.attributes == ("wool", "machine wash") and sweater.category == ("Clothing", "Men", "Sweaters")
    assert sweater.options == {"color": {"navy | white": None, "black": None}, "size": {"large": None}}
    assert sweater.price is None and sweater.bullets == ("machine wash", "long sleeve", "Warm and soft.")
    assert catalog["B000000002"].price == 1019.5 and catalog["B000000002"].category == ("electronics", "lamps")
    assert catalog["B000000003"].price == 100.0 and catalog["B000000003"].options == {} and catalog["B000000003"].attributes == ()
    tasks = by_product(webshop)
    assert tasks["B000000001", "i need"].goal.price_ceiling == 40.0
    assert tasks["B000000001", "i need"].goal.options == {"color": "navy | white", "size": "large"}
    assert tasks["B000000002", "find m"].goal.price_ceiling is None
    assert sorted((r["kind"], r["reason"]) for r in webshop.report.rejected) == [
        ("product", "duplicate id"),
        ("product", "id longer than 10 characters"),
        ("product", "no id"),
        ("row", "neither attributes nor instructions"),
        ("task", "its product is not in the catalogue"),
        ("task", "no target attributes"),
    ]


def test_webshop_needs_the_products():
    with pytest.raises(InvalidSource, match="array of products"):
        import_files("webshop", WEBSHOP[:1], {}, 0)


def test_the_command_writes_identical_bytes_that_can_be_served(tmp_path, capsys):
    for form, files, sizes in (("shopsimulator", SHOPSIM, "train=4,validation=1,test=1"), ("webshop", WEBSHOP, "train=1,test=1")):
        for name in ("one", "two"):
            assert main(["import", "--format", form, *map(str, files), "--out", str(tmp_path / form / name), "--splits", sizes]) == 0
        printed = capsys.readouterr().out
        one, two = ({f.name: f.read_bytes() for f in (tmp_path / form / name).iterdir()} for name in ("one", "two"))
        assert one == two
        assert set(one) == {"products.jsonl", "tasks.jsonl", "splits.json", "rejected.jsonl", "import.json", "manifest.json"}
        manifest = json.loads(one["manifest.json"])
        assert manifest["sha256"] == {n: hashlib.sha256(data).hexdigest() for n, data in one.items() if n != "manifest.json"}
        stored = json.loads(one["import.json"])
        assert [s["sha256"] for s in stored["sources"]] == [hashlib.sha256(f.read_bytes()).hexdigest() for f in files]
        assert sum(stored["rejected"].values()) == len(one["rejected.jsonl"].splitlines())
        assert all(f"{count}  {reason}" in printed for reason, count in stored["rejected"].items())
        world = World.load(tmp_path / form / "one")
        session = Session(Shop(world), world.tasks[world.splits["train"][0]])
        assert session.step("search", {"query": session.task.instruction}).state["rows"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "--format", "webshop", "/no/such/file", "--out", "NEW"], "unreadable"),
        (["import", "--format", "shopsimulator", str(WEBSHOP[0]), "--out", "NEW"], "of the format named"),
        (["import", "--format", "shopsimulator", str(SHOPSIM[0]), "--out", "NEW"], "split 'test'"),
        (["import", "--format", "shopsimulator", str(SHOPSIM[0]), "--splits", f"train={10**25}", "--out", "NEW"], "split 'train'"),
        (["import", "--format", "shopsimulator", str(SHOPSIM[0]), "--out", str(FIXTURES)], "there is something already"),
        (["synth", "--language", "zh", "--num_products", "300", "--splits", "none", "--out", "/dev/null/x"], "cannot be written"),
        (["synth", "--language", "zh", "--num_products", "5", "--out", "NEW"], "raise it or ask for fewer"),
    ],
)
def test_mistakes_are_one_line(tmp_path, capsys, arguments, message):
    assert main([str(tmp_path / "new") if a == "NEW" else a for a in arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and not (tmp_path / "new").exists()


def test_split_sizes_that_do_not_fit_name_what_is_there():
    with pytest.raises(InvalidTask, match="sum to 9 tasks; 6 tasks in 4 components"):
        import_files("shopsimulator", SHOPSIM, {"train": 9}, 0)
    assert import_files("shopsimulator", SHOPSIM, {}, 0).world.splits == {}


@pytest.mark.parametrize(
    ("value", "prices"),
    [
        (24, [24.0]),
        ("$12.50 to $20", [12.5, 20.0]),
        ("￥1,299.00元", [1299.0]),
        ("12-20", [12.0, 20.0]),
        ("2 for $5", [5.0]),
        ([1, "2", None], [1.0, 2.0]),
        ("-5", []),
        (float("nan"), []),
        (True, []),
        ("free", []),
        (1e12, []),
        (float("inf"), []),
        (10**400, []),
        ("9" * 400, []),
        ({}, []),
    ],
)
def test_prices(value, prices):
    assert prices_of(value) == prices


anything = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 500)
    | st.sampled_from([10**400, -(10**400)])
    | st.floats()
    | st.sampled_from(["", " ", "nan", "红/蓝", "$5", "XL", "a\ud800<|im_end|>", "B0"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["value", "price", "attributes", "颜色", ""]), inner, max_size=3),
    max_leaves=8,
)
ROW_KEYS = [
    "title",
    "name",
    "attribute",
    "category",
    "pricing",
    "customization_options",
    "images",
    "instructions",
    "user_persona",
    "small_description",
]
RECORD_KEYS = ["instruction", "instruction_simple", "attributes", "instruction_options", "instruction_attributes", "price_upper"]
records = st.lists(st.dictionaries(st.sampled_from(RECORD_KEYS), anything) | anything, max_size=2)
rows = st.fixed_dictionaries(
    {"asin": st.sampled_from(["B0", "B1", "B2", 3, None, float("nan")]), "title": st.just("a title"), "pricing": anything},
    optional={key: records if key == "instructions" else anything for key in ROW_KEYS if key not in ("title", "pricing")},
)


@settings(max_examples=150)
@given(products=st.lists(rows | anything, max_size=4), instructions=st.dictionaries(st.sampled_from(["B0", "B1", "9"]), records | anything))
def test_no_row_stops_an_import(tmp_path_factory, products, instructions):
    folder = tmp_path_factory.getbasetemp()
    files = {"items.json": products, "instructions.json": instructions}
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    for form, names in (("shopsimulator", ["items.json"]), ("webshop", list(files))):
        try:
            imported = import_files(form, [folder / name for name in names], {}, 0)
        except InvalidSource as e:
            assert "no usable product" in str(e)
            continue
        world = imported.world
        assert dict(Catalog.from_bytes(world.catalog.to_bytes())) == dict(world.catalog)
        stored = json_lines(task.to_json() for task in world.tasks.values())
        assert [Task.from_json(json.loads(line)) for line in stored.splitlines()] == list(world.tasks.values())
        assert len(imported.report.to_bytes().splitlines()) == len(imported.report.rejected)
        assert imported.facts["products"] + sum(r["kind"] != "task" for r in imported.report.rejected) >= len(products)


def test_deeply_nested_rows_are_rejected(tmp_path):
    """At every depth: neither the parser nor what walks the values later runs out of stack."""
    rows = []
    for depth in range(0, 1200, 29):
        nested = "[" * depth + "1" + "]" * depth
        for key in ("user_persona", "pricing", "attribute", "instructions", "title"):
            rows.append(f'{{"asin": "{len(rows)}", "title": "a mug", "{key}": {nested}}}')
    (tmp_path / "rows.json").write_text(f"[{','.join(rows)}]")
    imported = import_files("shopsimulator", [tmp_path / "rows.json"], {}, 0)
    assert imported.facts["products"] + sum(r["kind"] != "task" for r in imported.report.rejected) == len(rows)
    assert imported.facts["rejected"]["row: not JSON"] == 39 * 5, "0, 29 and 58 lie within the bound"
    assert imported.facts["products"] >= 3 * 4


def test_rarer_faults(tmp_path):
    """Each has its reason: an id that the catalogue refuses, instructions that are no list, a persona that is no object, blank goal options."""
    task = {"instruction": "a soft mug", "attributes": ["soft"], "instruction_options": ["", "red"]}
    shop_rows = [
        {"asin": "61 0", "title": "a mug", "pricing": [1]},
        {"asin": "612", "title": "a mug", "pricing": [1], "instructions": "none"},
        {"asin": "613", "title": "a mug", "pricing": [1], "instructions": [task], "user_persona": "a shopper"},
        {"asin": "614", "title": "a mug", "pricing": [1], "instructions": [task], "user_persona": {"age": 31, "member": True, "x": " ", "y": [None]}},
    ]
    (tmp_path / "rows.json").write_text(json.dumps(shop_rows))
    imported = import_files("shopsimulator", [tmp_path / "rows.json"], {}, 0)
    assert imported.facts["rejected"] == {"product: breaks a rule of the catalogue": 1, "task: instructions are no list": 1}
    assert imported.facts["repaired"]["persona that is no object ignored"] == 1 and imported.facts["repaired"]["blank goal option dropped"] == 2
    assert [task.persona for task in imported.world.tasks.values()] == [{}, {"age": 31, "member": True}]
    assert [dict(task.goal.options) for task in imported.world.tasks.values()] == [{"option 1": "red"}] * 2

    (tmp_path / "items.json").write_text('[{"asin": "B1", "name": "a mug", "pricing": "$1"}]')
    (tmp_path / "broken.json").write_text('{"B1": [}, "B2": 3}')
    imported = import_files("webshop", [tmp_path / "items.json", tmp_path / "broken.json"], {}, 0)
    assert [r["reason"] for r in imported.report.rejected] == ["not JSON", "neither attributes nor instructions"]
