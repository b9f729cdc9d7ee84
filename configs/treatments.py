"""Treatments: controls and related methods as settings of the same loop, each a word after the colon of a config.

    python launch/train.py --config=configs/pocket.py:demo,plain_grpo
    python launch/train.py --config=configs/coevolve.py:retrieval,no_gate
    python launch/train.py --config=configs/pocket.py:q=0.5

| word | what differs | like |
|---|---|---|
| `plain_grpo` | no prompt carries a skill, and the bank stays as it is | GRPO |
| `no_mask` | every prompt carries the whole bank | guidance that is never withdrawn |
| `fixed_bank` | masks as ever, but nothing is analysed or measured: the first bank stays | |
| `no_gate` | the analyst's candidates join the bank unmeasured, nothing retires | |
| `q=NUMBER` | another probability of a skill-free group | |
| `withdrawal` | the whole bank at first, less with every group, nothing at the run's end | SKILL0, with `fixed_bank` |
| `mixed` | every episode of a group has a mask of its own, so advantages compare contexts: it breaks the within-context comparison | EDGE |
| `retrieval` | each task carries the two chunks nearest to its words, in training and in the test condition with skills | SkillRL, with `no_gate` |

Words are joined by commas and applied in order; the run's name gets them, so that a control does not meet its counterpart's directory. The
switches behind them are `curriculum.q`, `rho_*`, `withdraw_over`, `mixed`, `retrieve` and `bank.revision`. Learned selection of skills (a policy that
picks what its prompt carries) is left out: it needs a trained selector, which this loop has no place for.
"""

from ml_collections import ConfigDict


def _plain_grpo(config: ConfigDict) -> None:
    config.curriculum.q = 1.0
    config.bank.revision = "fixed"


def _no_mask(config: ConfigDict) -> None:
    config.curriculum.update({"q": 0.0, "rho_min": 1.0, "rho_max": 1.0, "rho_unmeasured": 1.0})


def _fixed_bank(config: ConfigDict) -> None:
    config.bank.revision = "fixed"


def _no_gate(config: ConfigDict) -> None:
    config.bank.revision = "ungated"


def _withdrawal(config: ConfigDict) -> None:
    _no_mask(config)
    # A reference: an override of the schedule on the command line moves the end of the withdrawal along.
    steps = config.schedule.get_ref("rounds") * config.schedule.get_ref("steps_per_round")
    config.curriculum.withdraw_over = steps * config.rollout.get_ref("oversample")


def _mixed(config: ConfigDict) -> None:
    config.curriculum.mixed = True


def _retrieval(config: ConfigDict) -> None:
    config.curriculum.update({"q": 0.0, "retrieve": 2})


TREATMENTS = {
    "plain_grpo": _plain_grpo,
    "no_mask": _no_mask,
    "fixed_bank": _fixed_bank,
    "no_gate": _no_gate,
    "withdrawal": _withdrawal,
    "mixed": _mixed,
    "retrieval": _retrieval,
}


def apply(config: ConfigDict, words: list[str], source: str) -> None:
    """Applies the treatments named by `words`, in order; `source` is the config file, for the error about an unknown one."""
    for word in words:
        name, equals, value = word.partition("=")
        if word in TREATMENTS:
            TREATMENTS[word](config)
        elif name == "q" and equals:
            try:
                config.curriculum.q = float(value)
            except ValueError:
                raise ValueError(f"{source}: {word!r} is no probability; write e.g. q=0.5") from None
        else:
            raise ValueError(f"{source} has no variant {word!r}; choose among {', '.join(TREATMENTS)}, q=NUMBER")
        config.name += f"-{word.replace('_', '-')}"
