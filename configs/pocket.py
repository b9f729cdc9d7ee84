"""The whole loop with the pocket model on two CPU cores.

    python launch/train.py --config=configs/pocket.py:demo      what `make demo` runs: two rounds, minutes
    python launch/train.py --config=configs/pocket.py           the full schedule: four rounds of 20 steps
    python launch/train.py --config=configs/pocket.py:dev       the same on the dev catalogue, where the substrate was tuned
    python launch/train.py --config=configs/pocket.py:smoke     the same code at toy sizes, for tests

A size may be followed by treatments, or treatments stand alone for the full schedule: `configs/pocket.py:demo,plain_grpo`; see configs/treatments.py.
Every value can be overridden: `--config.grpo.learning_rate=3e-4`. Results are in docs/pocket.md; `--dry_run` estimates the duration.
"""

from ml_collections import ConfigDict

from configs import treatments


def _full() -> ConfigDict:
    config = ConfigDict()
    config.name = "pocket"
    config.runs_directory = "runs"
    config.seed = 0
    _start(config)
    _fast_loop(config)
    _slow_loop(config)
    _machine(config)
    return config


def _start(config: ConfigDict) -> None:
    """The policy, its skills and its shop."""
    config.model = ConfigDict(
        {
            "checkpoint": "pocket/checkpoint",
            "thinking": True,
            "dtype": "float32",
            "remat": "none",
            "attention": "blocked",
            "chunk_size": 32,
            "piece_length": 0,
            "scan_layers": False,
        }
    )
    config.bank = ConfigDict({"path": "pocket/bank.json", "max_active": 10, "mechanisms": "pocket/mechanisms.json"})
    config.bank.revision = "gated"  # who decides about the next bank: the gate; "ungated": nobody; "fixed": there is none

    # The shop: a synthetic world served over HTTP on a loopback port (0: any free one).
    config.shop = ConfigDict(
        {"seed": 20, "num_products": 2400, "train": 1200, "validation": 400, "test": 400, "page_size": 5, "max_actions": 22, "port": 0}
    )


def _fast_loop(config: ConfigDict) -> None:
    config.schedule = ConfigDict({"rounds": 4, "steps_per_round": 20})
    config.rollout = ConfigDict(
        {
            "group_size": 8,
            "groups_per_step": 16,
            "oversample": 24,
            "temperature": 1.0,
            "max_new_tokens": 40,
            "max_context": 1152,
            "max_steps": 24,
            "num_slots": 128,
            "decode_rows": 32,
            "decode_block": 4,
            "attempts": 2,
            "max_technical_in_a_row": 20,
            # 1: the next step is played while one trains, by weights that are one version older; needs grpo.sampler_correction (docs/training.md).
            "overlap": 0,
        }
    )
    # embedded: in this process. sglang: servers behind SGLang's HTTP contract; dtype is what they hold, layout how weights reach them.
    config.engine = ConfigDict(
        {
            "kind": "embedded",
            "addresses": (),
            "dtype": "bfloat16",
            "layout": "orbax",
            "turn_seconds": 600.0,
            "start_seconds": 1800.0,
            "load_seconds": 900.0,
            "shares_memory": False,  # the servers compute on the trainer's devices and lend it their memory while it updates
        }
    )
    # The objective's options and how episodes are packed: docs/training.md.
    config.grpo = ConfigDict(
        {
            "learning_rate": 5e-4,
            "betas": (0.9, 0.98),
            "weight_decay": 0.0,
            "max_grad_norm": 1.0,
            "clip_low": 0.2,
            "clip_high": 0.28,
            "normalise_std": True,
            "aggregation": "episode_mean",
            "fixed_length": 0,
            "ratio": "token",
            "sampler_correction": "none",
            "sampler_cap": 2.0,
            "kl_coefficient": 0.0,
            "overlong": "drop",
            "updates_per_step": 2,
            "row_length": 1152,
            "trained_per_row": 384,
            "rows_per_microbatch": 3,
            "row_unit": 0,
        }
    )
    # scale 0: the largest contribution earns rho_max. The last three are treatments: guidance fades to nothing over N groups; each task gets the K
    # chunks nearest to it; every episode of a group has its own mask, which breaks the within-context comparison.
    config.curriculum = ConfigDict({"q": 0.2, "rho_min": 0.2, "rho_max": 0.9, "rho_unmeasured": 0.5, "scale": 0.0})
    config.curriculum.update({"withdraw_over": 0, "retrieve": 0, "mixed": False})


def _slow_loop(config: ConfigDict) -> None:
    config.analysis = ConfigDict({"max_cards": 16, "max_candidates": 6})
    config.validation = ConfigDict({"tasks": 400, "samples": 1})
    config.test = ConfigDict({"tasks": 400, "samples": 1})


def _machine(config: ConfigDict) -> None:
    """What it is computed on, what is kept, and how it is watched."""
    config.mesh = ConfigDict({"data": 1, "fsdp": 1, "tensor": 1})
    # The newest `keep` stay, and for good those of steps divisible by keep_every (0: none).
    config.checkpoint = ConfigDict({"every_steps": 1, "keep": 2, "keep_every": 0})
    # Floating-point operations a second that one device can do at model.dtype, by its maker's word; 0: unknown, and no share of it is reported.
    config.telemetry = ConfigDict({"peak_flops": 0.0})
    # Several processes, one run (docs/training.md). detect: ask the cluster (TPU slice, GKE, Slurm) for them where no flag names them. start: how
    # long they may take to find each other; heartbeat: how long one may say nothing before the others give up.
    config.distributed = ConfigDict({"detect": False, "start_seconds": 300.0, "heartbeat_seconds": 60.0})


def _demo(config: ConfigDict) -> None:
    config.name = "pocket-demo"
    config.schedule.update({"rounds": 2, "steps_per_round": 8})
    config.rollout.update({"groups_per_step": 12, "oversample": 16})
    config.validation.tasks = 300
    config.test.tasks = 300


def _dev(config: ConfigDict) -> None:
    config.name = "pocket-dev"
    config.shop.seed = 7  # pocket.warm_start.DEV_SEED, which a config may not import: it would start JAX


def _smoke(config: ConfigDict) -> None:
    config.name = "pocket-smoke"
    config.shop.update({"num_products": 200, "train": 60, "validation": 16, "test": 16})
    config.schedule.update({"rounds": 2, "steps_per_round": 1})
    config.rollout.update({"group_size": 4, "groups_per_step": 3, "oversample": 4, "num_slots": 16, "decode_rows": 16})
    config.validation.tasks = 16
    config.test.tasks = 16
    config.analysis.max_cards = 4


_SIZES = {"demo": _demo, "dev": _dev, "smoke": _smoke}


def get_config(variant: str = "") -> ConfigDict:
    """The config named by the string after the colon: a size, treatments, or both, joined by commas."""
    words = variant.split(",") if variant else []
    config = _full()
    if words and words[0] in _SIZES:
        _SIZES[words.pop(0)](config)
    treatments.apply(config, words, f"configs/pocket.py (sizes {', '.join(_SIZES)} go first)")
    return config
