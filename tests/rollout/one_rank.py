"""One rank of a tensor-parallel server, as a process: loads versions, answers with the digests. Arguments: rank, size, port, model, versions."""

import json
import pathlib
import sys

sys.path[0] = str(pathlib.Path(__file__).parent.parent)
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent.parent))

import tensorstore  # noqa: E402
import torch  # noqa: E402
from rollout import sglang_like  # noqa: E402

from intraskill.rollout import sglang_loader  # noqa: E402

rank, size, port, directory = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], pathlib.Path(sys.argv[4])
torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=size)
model = sglang_like.Model(sglang_like.text_config(directory), rank, size)


def bytes_read() -> int:
    found = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(value["value"] for metric in found for value in metric["values"])


for version in sys.argv[5:]:
    before = bytes_read()
    sglang_loader.load(model, [("orbax_path", torch.tensor(list(version.encode()), dtype=torch.uint8))])
    print(json.dumps({**sglang_like.ask(model), "bytes": bytes_read() - before}), flush=True)
torch.distributed.destroy_process_group()
