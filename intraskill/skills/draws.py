"""Random numbers that are pure functions of a key: the same key gives the same draw on every machine, in any order, in any process.

Every random decision about skills (a group's mask, a validation assignment) is keyed by what it is FOR instead of being taken from a
shared stream, so worker order, retries and resumption cannot change it.
"""

import hashlib

import numpy as np

from intraskill.skills import records


def generator(*key: str | int) -> np.random.Generator:
    """A generator whose whole stream is determined by `key` (through sha256 and Philox, both specified bit by bit)."""
    seed = hashlib.sha256(records.canonical(list(key))).digest()[:16]
    return np.random.Generator(np.random.Philox(key=int.from_bytes(seed, "big")))


def uniform(*key: str | int) -> float:
    """One uniform number in [0, 1)."""
    return float(generator(*key).random())
