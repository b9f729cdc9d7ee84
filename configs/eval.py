"""A test condition: a policy, a bank or none, a split.

    python launch/eval.py --config=configs/eval.py:base              the committed policy without skills
    python launch/eval.py --config=configs/eval.py:base_initial      ... with the initial bank
    python launch/eval.py --config=configs/eval.py:final             the demo's final policy without skills
    python launch/eval.py --config=configs/eval.py:final_full        ... with its final bank

Any policy and bank: `--config.model.checkpoint=DIR --config.condition.bank=FILE`.
"""

from ml_collections import ConfigDict

from configs import pocket

_RUN = "runs/pocket-demo"
_CONDITIONS = {
    "base": ("pocket/checkpoint", ""),
    "base_initial": ("pocket/checkpoint", "pocket/bank.json"),
    "final": (f"{_RUN}/export", ""),
    "final_full": (f"{_RUN}/export", f"{_RUN}/rounds/002/bank.json"),
}


def get_config(condition: str = "base") -> ConfigDict:
    """The condition named by the string after the colon."""
    if condition not in _CONDITIONS:
        raise ValueError(f"configs/eval.py has no condition {condition!r}; choose one of {', '.join(_CONDITIONS)}")
    config = pocket.get_config("demo")
    checkpoint, bank = _CONDITIONS[condition]
    config.name = f"eval-{condition}"
    config.model.checkpoint = checkpoint
    # bank "": no skill in any prompt. Splits are the shop's: train, validation, test.
    config.condition = ConfigDict({"bank": bank, "split": "test", "tasks": 400, "samples": 1})
    return config
