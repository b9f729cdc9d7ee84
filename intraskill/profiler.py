"""A window of steps for `jax.profiler`, whose trace TensorBoard's profile plugin, xprof and Perfetto read.

A window is contiguous: where a round ends inside it, the evaluations between two steps are recorded as well. Python calls are not recorded, since
they would bury a rollout; the device's work, the runtime's and the steps are.
"""

import contextlib
import logging
import os
import re
from collections.abc import Iterator

import jax

from intraskill.types import InputError

_log = logging.getLogger(__name__)


def window(text: str, num_steps: int) -> range:
    """The steps that `FIRST:LAST` names, both included; a single number is one step, "" none. Raises InputError."""
    if not text:
        return range(0)
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (1, 0)
    if not first <= last < num_steps:
        raise InputError(f"profile = {text!r}: give FIRST:LAST, both included, with 0 <= FIRST <= LAST < {num_steps}, the number of the run's steps")
    return range(first, last + 1)


class Profiler:
    """Records the steps of a window; without one it does nothing."""

    def __init__(self, directory: str | os.PathLike[str], steps: range = range(0)):
        """Nothing is recorded before the window's first step; the trace goes to `directory`/plugins/profile.

        Raises InputError where that cannot be made: JAX would say so hours later, at the window's end.
        """
        self._directory, self._steps, self._recording = os.fspath(directory), steps, False
        if steps:
            try:
                os.makedirs(os.path.join(self._directory, "plugins", "profile"), exist_ok=True)
            except OSError as error:
                raise InputError(
                    f"no profile can be written to {self._directory} ({error}): remove what is in the way, or leave out --profile"
                ) from None

    def past(self, step: int) -> range:
        """The steps of the window that a run which goes on at `step` has done already, and which are not recorded."""
        return self._steps[: max(0, step - self._steps.start)]

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around one step of the run. A run that was resumed inside the window records the rest of it; an error ends the window."""
        if step not in self._steps:
            yield
            return
        if not self._recording:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0
            jax.profiler.start_trace(self._directory, profiler_options=options)
            self._recording = True
        try:
            with jax.profiler.StepTraceAnnotation("step", step_num=step):
                yield
        except BaseException:
            self.close()
            raise
        if step == self._steps[-1]:
            self.close()

    def close(self) -> None:
        """Ends the window and writes the trace, if one is being recorded; one that cannot be written is warned of and costs no run."""
        if self._recording:
            self._recording = False
            try:
                jax.profiler.stop_trace()
            except Exception as error:  # JAX's, RuntimeError or OSError
                _log.warning("the profile could not be written to %s and is lost: %s", self._directory, str(error)[:300])
