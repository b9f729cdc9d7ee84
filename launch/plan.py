"""Shows whether a config fits a machine that is not here, and what its work costs there at best.

    python launch/plan.py --config=configs/coevolve.py --topology=v5p:2x2x2 [--steps=gradient,apply] [--write=docs/plan.md]

Compiles the learner's programs and the embedded engine's decode call for the machine, from shapes alone. TPU slices (v5p, v6e, v5e) need the
package libtpu (`pip install '.[plan]'`) but no TPU; a step of the 4B takes minutes and up to 8 GB, so make one plan at a time. cpu:N plans for N
devices of this machine; h100:N is calculated by formula. Exit status: 0 it fits, 1 it does not (the last line says which setting helps), 2 bad input.
"""

import os
import sys

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from launch import entry  # noqa: E402  (sets the environment before JAX is imported)

from pathlib import Path  # noqa: E402

from absl import flags  # noqa: E402

from intraskill.pod_plan import plan, report  # noqa: E402
from intraskill.pod_plan.topology import Topology  # noqa: E402

_CONFIG = entry.define_config("configs/coevolve.py")
_TOPOLOGY = flags.DEFINE_string("topology", None, "KIND:SIZE, e.g. v5p:2x2x2, v6e:4x4, v5e:4x8, cpu:8, h100:8", required=True)
_STEPS = flags.DEFINE_list("steps", list(plan.STEPS), "steps to compile")
_WRITE = flags.DEFINE_string("write", None, "Markdown file to put the plan into, in place of an earlier one for the same machine")


def main(_) -> None:
    with entry.one_line_errors():
        topology = Topology.parse(_TOPOLOGY.value)
        topology.prepare()
        made = plan.make(_CONFIG.value, topology, _STEPS.value)
        print(report.text(made), end="")
        if _WRITE.value is not None:
            report.write(Path(_WRITE.value), made)
        sys.exit(1 if made.misfits else 0)


if __name__ == "__main__":
    entry.run(main)
