"""Qwen3.5-4B on a pod: the schedule and hyper-parameters of the published run.

    python launch/train.py --config=configs/coevolve.py --config.model.checkpoint=DIR_OF_QWEN3.5_4B

Not run by us: no accelerator was at hand. Four rounds of 20 steps generate 20,480 episodes and train on 10,240 in 160 updates; the
published run took 209 to 245 s of rollout a step on four 80 GB devices. Mesh and numerics are for eight v5p chips; `launch/plan.py` shows what
fits on which slice and names the settings for another (docs/plan.md). Each host of the slice starts the same command (docs/training.md,
launch/pods/). Episodes come from SGLang servers (docs/rollout.md says how to start them), or from `launch/serve_engine.py` where there is no SGLang;
all hosts and servers must see the run's directory under the same path. Controls are words after a colon, `configs/coevolve.py:plain_grpo`; see
configs/treatments.py.
"""

from ml_collections import ConfigDict

from configs import pocket, treatments


def get_config(variant: str = "") -> ConfigDict:
    """The published run, or a treatment of it: words of configs/treatments.py, joined by commas."""
    config = pocket.get_config()
    config.name = "coevolve"
    config.model.update(
        {
            "checkpoint": "checkpoints/Qwen3.5-4B",
            "dtype": "bfloat16",
            "remat": "layer",
            "attention": "auto",  # the kernel on TPUs
            "chunk_size": 64,
            "piece_length": 2048,
            "scan_layers": True,
        }
    )
    # The cold start that would write an initial bank for a 4B policy is not built yet: this one is the pocket shop's.
    config.shop.update({"num_products": 22726, "train": 3726, "validation": 400, "test": 400, "page_size": 20, "max_actions": 30})
    config.schedule.update({"rounds": 4, "steps_per_round": 20})
    config.rollout.update(
        {
            "group_size": 8,
            "groups_per_step": 16,
            "oversample": 32,
            "temperature": 0.6,
            "max_new_tokens": 4096,
            "max_context": 24576,
            "max_steps": 30,
            "num_slots": 64,
            "decode_rows": 64,
        }
    )
    config.engine.update({"kind": "sglang", "addresses": ("http://127.0.0.1:30000",)})
    config.grpo.update(
        {
            "learning_rate": 1e-6,
            "betas": (0.9, 0.98),
            "weight_decay": 0.1,
            "row_length": 24576,
            "trained_per_row": 12288,
            "rows_per_microbatch": 8,
            "row_unit": 4096,
            "updates_per_step": 2,
        }
    )
    config.curriculum.update({"q": 0.2, "rho_min": 0.2, "rho_max": 0.9})
    config.mesh.update({"data": 1, "fsdp": 8, "tensor": 1})
    config.distributed.detect = True
    treatments.apply(config, variant.split(",") if variant else [], "configs/coevolve.py")
    return config
