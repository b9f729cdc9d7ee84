"""The benchmark against another project's model says in one line what it lacks, since that project is not part of this one."""

import sys
import typing

import pytest

from benchmarks.peers import skyrl_qwen35
from intraskill.types import InputError


@pytest.fixture
def imports(monkeypatch):
    """Nothing that a test imports from a made-up checkout stays."""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] == "skyrl":
            del sys.modules[name]


def test_not_a_checkout(tmp_path, imports):
    with pytest.raises(InputError, match="give a clone of") as caught:
        skyrl_qwen35.import_port(tmp_path)
    said = str(caught.value)
    assert str(tmp_path) in said and skyrl_qwen35.PORT in said and skyrl_qwen35.REVISION in said and "\n" not in said


def test_a_missing_package_is_named_with_the_command(tmp_path, imports):
    for name, text in (("tinker/types", "import typing"), ("tx/models/configs", "import no_such_package"), ("tx/models/qwen3_5", "")):
        path = tmp_path / "skyrl" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    typed_dict = typing.TypedDict
    with pytest.raises(InputError, match="no_such_package.*pip install --no-deps") as caught:
        skyrl_qwen35.import_port(tmp_path)
    assert "\n" not in str(caught.value) and typing.TypedDict is typed_dict


@pytest.mark.torch
def test_the_script_ends_with_that_line(tmp_path, capsys):
    pytest.importorskip("torch")
    from benchmarks import public_port

    with pytest.raises(SystemExit) as ended:
        public_port.main([f"--checkout={tmp_path}"])
    assert ended.value.code == 2 and "error: --checkout=" in capsys.readouterr().err.splitlines()[-1]
