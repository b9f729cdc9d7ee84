import gzip
import json
import tracemalloc
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shop_env.errors import InvalidSource
from shop_env.importers import json_stream
from shop_env.importers.json_stream import Unreadable, array_elements, object_items


def read(path, text, chunk=1 << 20, reader=array_elements):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with mock.patch.object(json_stream, "_CHUNK", chunk):
        return ["BAD" if isinstance(e, Unreadable) else e for e in reader(path)]


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 64, 1 << 20])
@pytest.mark.parametrize(
    ("text", "elements"),
    [
        ('[{"a": "x,]}\\"{"}, {"b": [1, {"c": 2}]} , 3, "s", null,]', [{"a": 'x,]}"{'}, {"b": [1, {"c": 2}]}, 3, "s", None]),
        (" [ ] ", []),
        ("\ufeff[1]", [1]),
        ('[{"a": 1},\n{"a": "5" x"},\n{"a": 3}]', [{"a": 1}, "BAD", {"a": 3}]),  # one quote too many
        ('[{"a": 1}, {"b": [1, 2}, {"a": 3}, {"a": 4}]', [{"a": 1}, "BAD", {"a": 3}, {"a": 4}]),  # one bracket too few
        ('[{"a": 1}, {"a": 2}}, {"a": 3}]', [{"a": 1}, "BAD", {"a": 3}]),  # one bracket too many
        ('[{"a": 1}, {a: 2}, {"a": 3}]', [{"a": 1}, "BAD", {"a": 3}]),
        ('[{"a": 1}, {"a": 2', [{"a": 1}, "BAD", "BAD"]),  # cut short: the rest, and the missing end
        ('[{"a": 1}] {"a": 2}', [{"a": 1}, "BAD"]),
        (b'["\xff"]', ["\ufffd"]),
        ("[" + "[" * 63 + "]" * 63 + ", " + "[" * 64 + "]" * 64 + ", 1]", [json.loads("[" * 63 + "]" * 63), "BAD", 1]),
        ("[" + "[" * 100_000 + "]" * 100_000 + ", 1]", ["BAD", 1]),  # too deep for the parser
    ],
)
def test_good_elements_survive_bad_ones(tmp_path, text, elements, chunk):
    if chunk < 64 and len(text) > 1000:
        chunk = 64
    assert read(tmp_path / "x.json", text, chunk) == elements


def test_not_a_number_is_read(tmp_path):
    nan, infinity = read(tmp_path / "x.json", "[NaN, -Infinity]")
    assert nan != nan and infinity == float("-inf")


def test_objects(tmp_path):
    items = read(tmp_path / "x.json", '{"k": [1], "l": {"x": 2}, "m": , "n": "}"}', reader=object_items)
    assert items[:2] == [("k", [1]), ("l", {"x": 2})] and items[3] == ("n", "}")
    assert items[2][0] == "" and isinstance(items[2][1], Unreadable)


def test_compressed_files_whole_and_cut_short(tmp_path):
    data = gzip.compress(b"[" + b",".join(b'{"n": %d}' % i for i in range(10_000)) + b"]")
    assert read(tmp_path / "x.json", data) == [{"n": i} for i in range(10_000)]
    rows = read(tmp_path / "y.json", data[: len(data) // 2])
    assert rows[:3] == [{"n": 0}, {"n": 1}, {"n": 2}] and rows[-1] == "BAD" and 100 < len(rows) < 10_000


@pytest.mark.parametrize("text", ["", "x", '{"a": 1}', '"s"'])
def test_files_of_another_shape_are_refused(tmp_path, text):
    with pytest.raises(InvalidSource, match="of the format named"):
        read(tmp_path / "x.json", text)


def test_damaged_and_missing_files_are_refused(tmp_path):
    with pytest.raises(InvalidSource, match="unreadable"):
        list(array_elements(tmp_path / "absent.json"))
    data = bytearray(gzip.compress(b"[1, 2, 3]"))
    data[-6] ^= 1  # the checksum
    with pytest.raises(InvalidSource, match="unreadable"):
        read(tmp_path / "x.json.gz", bytes(data))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(alphabet='a"\\{}[],:\n \u4e2d', max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(alphabet='a"{', max_size=2), inner, max_size=3),
    max_leaves=12,
)


@given(st.lists(json_values, max_size=5), st.integers(1, 40), st.sampled_from([None, 1]))
def test_whatever_json_writes_reads_back(tmp_path_factory, values, chunk, indent):
    path = tmp_path_factory.getbasetemp() / "round_trip.json"
    assert read(path, json.dumps(values, indent=indent, ensure_ascii=bool(indent)), chunk) == values


def test_memory_does_not_grow_with_the_file(tmp_path):
    path = tmp_path / "big.json"
    row = json.dumps({"asin": "1", "reviews": "x" * 100_000})
    with open(path, "w") as file:
        file.write("[" + ",\n".join([row] * 300) + "]")
    size = path.stat().st_size
    tracemalloc.start()
    count = sum(1 for _ in array_elements(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 300 and size > 30e6 and peak < size / 3
