"""These tests need a real SGLang and run in `make test-sglang` only; a run without a failure writes its figures into docs/rollout.md."""

import os

import pytest
from rollout.conftest import served

__all__ = ["served"]

if not os.environ.get("INTRASKILL_SGLANG"):
    collect_ignore_glob = ["test_*.py"]


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session, exitstatus):
    from sglang_cpu import results

    # Not after a part of the tests, whose figures would stand beside older ones.
    if os.environ.get("INTRASKILL_SGLANG") and exitstatus == 0 and results.complete():
        results.write(session.testscollected)
