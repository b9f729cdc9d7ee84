"""Groups built by hand for tests of the filter and the records."""

from rollout.fakes import TASK, completion

from intraskill.types import Group, Mask, MaskKind, Status, Trajectory, Turn


def trajectory(reward: float, status: Status = Status.PURCHASE) -> Trajectory:
    if status == Status.TECHNICAL:
        return Trajectory((7,), (False,), (0.0,), (), status, 0.0, False, error="engine gone")
    turn = Turn(1, completion(1, 0), "1 0", None, "no_tool_call", "", "")
    return Trajectory((7, 1, 0), (False, True, True), (0.0, -0.5, -1.5), (turn,), status, reward, reward == 1.0)


def group(index: int, *rewards: float | None) -> Group:
    """None stands for a technical failure."""
    episodes = tuple(trajectory(0.0, Status.TECHNICAL) if r is None else trajectory(r) for r in rewards)
    return Group(index, TASK, Mask(MaskKind.SKILL_FREE), episodes)
