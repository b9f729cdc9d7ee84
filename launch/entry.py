"""What every entry point shares: one-line errors with status 2, Ctrl-C with a hint, and a config file flag that refuses unknown keys."""

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator

# Until `run` takes over, Ctrl-C ends the process at once: the seconds of imports have nothing to tidy up and a traceback through them helps nobody.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# XLA on CPU takes and returns hundreds of megabytes a step; with these settings glibc keeps them, in huge pages, instead of having the kernel clear
# them anew each time (measured: 1.4 times the training speed). glibc reads them when a process starts, hence the one re-execution.
ALLOCATOR = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "10000000000",
    "MALLOC_TOP_PAD_": "268435456",
}
_IS_SCRIPT = os.path.dirname(os.path.abspath(sys.argv[0])) == os.path.dirname(os.path.abspath(__file__))
if sys.platform == "linux" and _IS_SCRIPT and not any(name in os.environ for name in ALLOCATOR):
    os.environ.update(ALLOCATOR)
    os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])

# Before JAX is imported anywhere: a compilation cache makes the second start fast, and its absence changes no result.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.expanduser("~/.cache/intraskill/jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

from absl import app, flags  # noqa: E402
from absl import logging as absl_logging  # noqa: E402
from ml_collections import config_flags  # noqa: E402

from intraskill.types import EngineError, InputError, ProcessError, ShopError  # noqa: E402
from shop_env.errors import ShopEnvError  # noqa: E402

INTERRUPTED = 130


def define_config(default: str):
    """The `--config=FILE[:VARIANT]` flag, with overrides such as `--config.grpo.learning_rate=3e-4`."""
    return config_flags.DEFINE_config_file("config", default, "config file, with an optional variant after a colon", lock_config=True)


@contextlib.contextmanager
def one_line_errors(hint: Callable[[], str] = str) -> Iterator[None]:
    """Turns expected errors into one line and an exit status; anything else is a bug and keeps its traceback."""
    try:
        yield
    except (InputError, EngineError, ProcessError, ShopError, ShopEnvError) as error:
        sys.exit(_report(str(error), 2))
    except OSError as error:
        sys.exit(_report(f"{error}; check the path, its permissions and the space left on its disk", 2))
    except KeyboardInterrupt:
        sys.exit(_report(f"interrupted{hint()}", INTERRUPTED))


def _report(message: str, status: int) -> int:
    print(f"error: {' '.join(message.split())}" if status == 2 else message, file=sys.stderr, flush=True)
    return status


def run(main) -> None:
    """`app.run` with flag errors, broken configs included, answered like any other bad input."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    logging.getLogger("jax._src.xla_bridge").setLevel(logging.ERROR)
    app.run(main, flags_parser=_parse)


def _own_words(error: Exception) -> str:
    """The message; of one that ml_collections wrapped together with its traceback, what was raised first."""
    if isinstance(error, KeyError | AttributeError):
        inner = error.args[0] if error.args else ""
        return f"there is no key {inner.args[0] if isinstance(inner, KeyError) else inner}"
    text = str(error).strip()
    return text.splitlines()[-1].partition(": ")[2] if "Traceback (most recent call last)" in text else text


def _parse(argv: list[str]) -> list[str]:
    try:
        rest = flags.FLAGS(argv)[1:]
        if "config" in flags.FLAGS:
            dict(flags.FLAGS["config"].value or {})  # a file that could not be read says so only when it is used
    except flags.Error as error:
        sys.exit(_report(_own_words(error), 2))
    except (AttributeError, KeyError, TypeError, ValueError, OSError, ImportError, SyntaxError) as error:
        # ml_collections reports unknown keys, wrong types and unreadable config files with these.
        sys.exit(_report(f"--config: {_own_words(error)}; `--help` lists the flags, the config file its keys", 2))
    if rest:  # a forgotten --config= would otherwise start another run than the one meant
        sys.exit(_report(f"unexpected argument {rest[0]!r}: every setting is a flag, e.g. --config=FILE:VARIANT", 2))
    if flags.FLAGS["verbosity"].using_default_value:  # libraries log every file they touch
        absl_logging.set_verbosity(absl_logging.WARNING)
    return argv[:1]
