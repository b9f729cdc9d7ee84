import pytest
from hypothesis import given
from hypothesis import strategies as st

from shop_env.errors import InvalidTask
from shop_env.tasks import Goal, Task, components, split_tasks


def task(i: int, product: str = "", short: str = "", persona: str = "", user: str = "") -> Task:
    persona_dict = {"taste": persona} if persona else {}
    return Task(f"t{i:04d}", short or f"short {i}", f"full {i}", persona_dict, Goal(product or f"p{i}", (), {}, None), user)


def test_components_join_over_every_kind_of_link():
    tasks = [
        task(0, product="x"),
        task(1, product="x", short="Get  a MUG"),
        task(2, short="get a mug"),
        task(3, persona="tea", user="u"),
        task(4, persona="tea"),
    ]
    tasks += [task(5, user="U,"), task(6), task(7)]
    assert components(tasks) == [["t0000", "t0001", "t0002"], ["t0003", "t0004", "t0005"], ["t0006"], ["t0007"]]


def test_blank_fields_link_nothing():
    assert len(components([task(i) for i in range(5)])) == 5


letters = st.sampled_from(["", "a", "b", "c", "d", "e"])


@given(links=st.lists(st.tuples(letters, letters, letters, letters), min_size=1, max_size=40), seed=st.integers(0, 99), data=st.data())
def test_splits_have_the_asked_sizes_and_never_share_a_link(links, seed, data):
    tasks = [task(i, *link) for i, link in enumerate(links)]
    held_out = data.draw(st.sampled_from([len(c) for c in components(tasks) if len(c) <= 20] or [0]))
    sizes = {"train": len(tasks) - held_out, "test": held_out}
    if held_out > sizes["train"]:
        return  # the larger split is filled last and takes whatever is whole; this case is the same with the names exchanged
    splits = split_tasks(tasks, sizes, seed)
    assert {name: len(ids) for name, ids in splits.items()} == sizes
    assert splits == split_tasks(tasks[::-1], sizes, seed)
    by_id = {t.id: t for t in tasks}
    links_of = {name: {link for i in ids for link in by_id[i].links()} for name, ids in splits.items()}
    assert not links_of["train"] & links_of["test"]
    assert not set(splits["train"]) & set(splits["test"])


def test_sizes_need_not_use_every_task_and_depend_on_the_seed():
    tasks = [task(i) for i in range(100)]
    splits = split_tasks(tasks, {"train": 50, "validation": 10, "test": 10}, 1)
    assert list(splits) == ["train", "validation", "test"] and [len(v) for v in splits.values()] == [50, 10, 10]
    assert splits != split_tasks(tasks, {"train": 50, "validation": 10, "test": 10}, 2)


def test_impossible_sizes_are_refused():
    pairs = [task(i, product=f"x{i // 2}") for i in range(10)]
    with pytest.raises(InvalidTask, match="no whole components sum to 3"):
        split_tasks(pairs, {"train": 5, "test": 3}, 0)
    with pytest.raises(InvalidTask, match="sum to 11"):
        split_tasks(pairs, {"train": 11}, 0)
    with pytest.raises(InvalidTask, match="unique"):
        split_tasks([task(1), task(1)], {"train": 1}, 0)


def test_large_families_stay_out_of_held_out_splits():
    tasks = [task(i, product="x") for i in range(21)] + [task(100 + i) for i in range(21)]
    splits = split_tasks(tasks, {"train": 21, "test": 21}, 0)
    assert {i < "t0100" for i in splits["test"]} == {False}


def test_bad_tasks_and_goals_are_refused():
    with pytest.raises(InvalidTask, match="needs an id"):
        Task("", "a", "", {}, Goal("p", (), {}, None))
    with pytest.raises(InvalidTask, match="price_ceiling"):
        Goal("p", (), {}, float("nan"))
    with pytest.raises(InvalidTask, match="malformed"):
        Task.from_json({"id": "t"})


def test_test_is_filled_first_then_validation_then_train():
    tasks = [task(i) for i in range(60)]
    full = split_tasks(tasks, {"train": 40, "validation": 10, "test": 10}, 3)
    assert full["test"] == split_tasks(tasks, {"test": 10}, 3)["test"]
    assert full["validation"] == split_tasks(tasks, {"validation": 10, "test": 10}, 3)["validation"]


def test_sizes_are_met_exactly_by_families_of_many_sizes():
    """Families of 7, 5 and 3: 8 is only 5 + 3, and 400 and 400 need a search, not a greedy fill."""
    few = [task(i, user="a") for i in range(7)] + [task(10 + i, user="b") for i in range(5)] + [task(20 + i, user="c") for i in range(3)]
    splits = split_tasks(few, {"train": 7, "test": 8}, 0)
    assert {i[:4] for i in splits["train"]} == {"t000"} and len(splits["test"]) == 8
    many = [task(i, user=f"u{i // 7}") for i in range(4200)] + [task(5000 + i, user=f"v{i // 3}") for i in range(2400)]
    assert [len(ids) for ids in split_tasks(many, {"train": 3726, "validation": 400, "test": 400}, 0).values()] == [3726, 400, 400]
