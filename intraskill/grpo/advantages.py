"""Group-relative advantages: each episode counts once, however many tokens or turns it has.

No JAX here: a few floats per group, decided on the host before anything is packed.
"""

import numpy as np
from jaxtyping import Float


def group_advantages(rewards: Float[np.ndarray, " G"], *, divide_by_std: bool = True, eps: float = 1e-6) -> Float[np.ndarray, " G"]:
    """Centres a group's rewards and, by default, divides them by the sample standard deviation.

    advantage_i = (r_i - mean(r)) / (std(r) + eps), where std has the denominator G - 1.

    A group whose rewards are all equal (a group of one among them) gives zeros exactly: without that rule, rounding in the mean, divided by
    eps, would turn into a gradient.

    Args:
      rewards: one reward per episode of one group.
      divide_by_std: False leaves the centred rewards as they are, so that groups of near-equal rewards weigh less.
      eps: added to the standard deviation.

    Returns:
      One advantage per episode, float64.
    """
    rewards = np.asarray(rewards, np.float64)
    if rewards.ndim != 1 or rewards.size == 0:
        raise ValueError(f"rewards must be one non-empty list per group, got shape {rewards.shape}")
    if not np.isfinite(rewards).all():
        raise ValueError(f"rewards must be finite, got {rewards.tolist()}: a technical failure has no reward and may not reach the trainer")
    if np.all(rewards == rewards[0]):
        return np.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std(ddof=1) + eps) if divide_by_std else centred
