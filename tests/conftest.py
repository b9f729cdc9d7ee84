"""Every test runs strict: 8 virtual CPU devices, no implicit dtype or rank promotion, annotations checked, our warnings errors.

JAX reads its settings from the environment when it is first imported, so they are set here and JAX is not imported: the tests of the parts that never
import it stay fast. Subprocesses that tests start inherit them.
"""

import os
import pathlib

import hypothesis
import jaxtyping
import pytest

NUM_DEVICES = 8
CACHE = pathlib.Path(__file__).resolve().parent.parent / ".cache" / "jax"

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={NUM_DEVICES}".strip()
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"
# Compiled programs outlive the test run: most of the suite's time would otherwise go into compiling the same small models again.
os.environ["JAX_COMPILATION_CACHE_DIR"] = str(CACHE)
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

# How long an example takes depends on what else the machine does. CI draws the same examples each time; elsewhere each run draws new ones.
hypothesis.settings.register_profile(
    "intraskill", deadline=None, derandomize=bool(os.environ.get("CI")), suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("intraskill")

jaxtyping.install_import_hook(["intraskill", "shop_env"], "type_checker.check")


@pytest.fixture(autouse=True)
def _numerics(request):
    """`loose_numerics` lifts the promotion rules for one test."""
    if request.node.get_closest_marker("loose_numerics") is None:
        yield
        return
    import jax

    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def _fail_skip(report):
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    report.outcome = "failed"
    report.longrepr = f"INTRASKILL_NO_SKIPS is set, so a skip is a failure: {reason}"


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item, call):
    outcome = yield
    report = outcome.get_result()
    if os.environ.get("INTRASKILL_NO_SKIPS") and report.skipped and not hasattr(report, "wasxfail"):
        _fail_skip(report)


@pytest.hookimpl(hookwrapper=True)
def pytest_make_collect_report(collector):
    outcome = yield
    report = outcome.get_result()
    if os.environ.get("INTRASKILL_NO_SKIPS") and report.skipped:
        _fail_skip(report)
