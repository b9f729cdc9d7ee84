"""Checks the recipes of this folder without a cluster.

    python launch/pods/check.py

The scripts must be valid bash, and with --dry_run print commands and run none. In what they print, and in the JobSet, every setting of
`launch/train.py` must be a key of configs/coevolve.py, the mesh must be the devices that are asked for, and each engine address must be a server
that the recipe starts. Whether a cluster takes a manifest, only the cluster can say: `kubectl apply --dry-run=server -f launch/pods/gke_jobset.yaml`.
"""

import contextlib
import math
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

import yaml

from configs import coevolve

HERE = Path(__file__).resolve().parent
_FLAG = re.compile(r"--config\.([a-z0-9_.]+)=")
_CHIPS_PER_HOST = {"tpu-v5p-slice": 4, "tpu-v5-lite-podslice": 4, "tpu-v6e-slice": 4}


class BadRecipe(ValueError):
    """A recipe that could not work."""


def require(condition: bool, message: str) -> None:
    """Raises BadRecipe(message) unless `condition`."""
    if not condition:
        raise BadRecipe(message)


@contextlib.contextmanager
def reading(name: str) -> Iterator[None]:
    """Turns what a recipe of another form than expected raises into a BadRecipe."""
    try:
        yield
    except BadRecipe:
        raise
    except KeyError as error:
        raise BadRecipe(f"{name} lacks {error}") from error
    except (TypeError, AttributeError, IndexError, StopIteration, ValueError, OSError, yaml.YAMLError, subprocess.SubprocessError) as error:
        raise BadRecipe(f"{name} is not of the form that is checked here: {' '.join(str(error).split()) or type(error).__name__}") from error


def settings_of(command: Sequence[str]) -> dict[str, str]:
    """The overrides in the words of a `launch/train.py` command, each of them a key of the config."""
    config = coevolve.get_config()
    found = {}
    for word in command:
        match = _FLAG.match(word)
        if match is None:
            continue
        part: Any = config
        for name in match[1].split("."):
            require(name in part, f"--config.{match[1]}: configs/coevolve.py has no such key")
            part = part[name]
        found[match[1]] = word[match.end() :]
    return found


def check_training(command: Sequence[str], devices: int, servers: Sequence[str], name: str) -> None:
    """Raises BadRecipe unless the command trains on `devices` devices against exactly `servers`."""
    require("launch/train.py" in command and "--config=configs/coevolve.py" in command, f"{name}: trains with another command: {command}")
    settings = settings_of(command)
    config: Any = coevolve.get_config()
    sizes = [int(settings.get(f"mesh.{axis}") or config.mesh[axis]) for axis in ("data", "fsdp", "tensor")]
    require(math.prod(sizes) == devices, f"{name}: a mesh of {sizes} for {devices} devices")
    rows = int(settings.get("grpo.rows_per_microbatch") or config.grpo.rows_per_microbatch)
    require(rows % (sizes[0] * sizes[1]) == 0, f"{name}: {rows} rows a microbatch do not spread over a mesh of {sizes}")
    named = re.findall(r"'([^']*)'", settings.get("engine.addresses", ""))
    require(sorted(named) == sorted(servers), f"{name}: trains against {named}, starts {sorted(servers)}")


# -------------------------------------------------------------------------------------------------------------- scripts


def dry_run(script: Path, **variables: str) -> list[list[str]]:
    """The commands that a script prints when it is told to run none."""
    for command in (["bash", "-n", str(script)], ["bash", str(script), "--dry_run"]):
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables}, timeout=60, cwd=HERE.parent.parent)
        require(done.returncode == 0 and not done.stderr, f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    commands = [shlex.split(line) for line in done.stdout.splitlines()]
    require(bool(commands), f"{script} --dry_run prints no command")
    return commands


def check_tpu_vm(script: Path) -> None:
    """One creation, one deletion, and the same training command on all hosts of the slice."""
    with reading(script.name):
        _check_tpu_vm(script)


def _check_tpu_vm(script: Path) -> None:
    commands = dry_run(script, ENGINES="('http://a:1',)", PROJECT="p", ZONE="z", SHARE="s:/e")
    require({c[0] for c in commands} == {"gcloud"}, f"{script}: runs something else than gcloud")
    remote = [w.partition("=")[2] for c in commands for w in c if w.startswith("--command=")]
    require(all("--worker=all" in c for c in commands if any(w.startswith("--command=") for w in c)), f"{script}: not on every worker")
    trainings = [shlex.split(line) for line in remote if "launch/train.py" in line]
    require(len(trainings) == 2 and ["--resume" in t for t in trainings] == [False, True], f"{script}: trains once and resumes once")
    (kind,) = {w.partition("=")[2] for c in commands for w in c if w.startswith("--accelerator-type=")}
    cores = int(kind.rpartition("-")[2])
    for training in trainings:
        check_training(training, cores // 2 if kind.startswith("v5p") else cores, ["http://a:1"], script.name)


def check_slurm(script: Path) -> None:
    """Servers on a node of their own, or on the trainer's, and then with memory that they can lend."""
    with reading(script.name):
        _check_slurm(script)


def _check_slurm(script: Path) -> None:
    for shared in ("0", "1"):
        commands = dry_run(script, SHARED=shared)
        require({c[0] for c in commands} == {"srun"}, f"{script}: runs something else than srun")
        servers = [c for c in commands if "sglang.launch_server" in c]
        trainings = [c for c in commands if "launch/train.py" in c]
        require(len(trainings) == 1 and len(servers) + 1 == len(commands), f"{script}: one command trains, the others serve")
        nodes = [next(w.partition("=")[2] for w in c if w.startswith("--nodelist=")) for c in servers]
        addresses = [f"http://{node}:{c[c.index('--port') + 1]}" for node, c in zip(nodes, servers, strict=True)]
        (training,) = trainings
        gpus, tasks = (int(next(w.partition("=")[2] for w in training if w.startswith(f"--{name}="))) for name in ("gpus-per-node", "ntasks"))
        check_training(training, gpus * tasks, addresses, script.name)
        lends = all("--enable-memory-saver" in c for c in servers)
        wanted = settings_of(training).get("engine.shares_memory") == "True"
        require(lends == wanted == (shared == "1"), f"{script}: memory is shared where SHARED=1, and there only")
        own = next(w.partition("=")[2] for w in training if w.startswith("--nodelist=")).split(",")
        require(bool(set(own) & set(nodes)) == (shared == "1"), f"{script}: trains on {own}, serves on {sorted(set(nodes))}")


# --------------------------------------------------------------------------------------------------------------- JobSet


def _job(manifest: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = [job for job in manifest["spec"]["replicatedJobs"] if job["name"] == name]
    require(len(found) == 1, f"the JobSet has {len(found)} replicated jobs called {name}")
    require(found[0]["replicas"] == 1, f"{name}: replicas must be 1, the pods are its completions")
    spec = found[0]["template"]["spec"]
    require(spec["parallelism"] == spec["completions"] and spec["completionMode"] == "Indexed", f"{name}: all pods at once, indexed")
    require(spec["backoffLimit"] == 0, f"{name}: a pod must not be restarted alone, only with all others")
    return spec


def check_jobset(manifest: Mapping[str, Any]) -> None:
    """Raises BadRecipe unless trainer, slice, engines, volume and restarts fit together."""
    with reading("the JobSet"):
        _check_jobset(manifest)


def _check_jobset(manifest: Mapping[str, Any]) -> None:
    require((manifest["apiVersion"], manifest["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet"), "not a JobSet of v1alpha2")
    name = manifest["metadata"]["name"]
    require(manifest["spec"]["network"]["enableDNSHostnames"] is True, "without host names no pod finds another")
    require(manifest["spec"]["failurePolicy"]["maxRestarts"] > 0, "a failure must restart the set")
    require(manifest["spec"]["successPolicy"]["targetReplicatedJobs"] == ["trainer"], "the set has succeeded when the trainer has: engines never end")
    trainer, engines = _job(manifest, "trainer"), _job(manifest, "engines")
    pods = {kind: spec["template"]["spec"] for kind, spec in (("trainer", trainer), ("engines", engines))}
    for kind, pod in pods.items():
        require(pod["restartPolicy"] == "Never", f"{kind}: restartPolicy must be Never, see backoffLimit")
    containers = {kind: pod["containers"][0] for kind, pod in pods.items()}
    mounts = {kind: [m["mountPath"] for m in c["volumeMounts"]] for kind, c in containers.items()}
    claims = {kind: [v["persistentVolumeClaim"]["claimName"] for v in pod["volumes"]] for kind, pod in pods.items()}
    require(mounts["trainer"] == mounts["engines"] and claims["trainer"] == claims["engines"], f"trainer and engines see other directories: {mounts}")
    selector = pods["trainer"]["nodeSelector"]
    chips = math.prod(int(n) for n in selector["cloud.google.com/gke-tpu-topology"].split("x"))
    per_host = _CHIPS_PER_HOST[selector["cloud.google.com/gke-tpu-accelerator"]]
    require(containers["trainer"]["resources"]["limits"]["google.com/tpu"] == per_host, f"the trainer must ask for {per_host} chips a pod")
    require(trainer["completions"] * per_host == chips, f"{trainer['completions']} pods of {per_host} chips for a slice of {chips}")
    port = next(w.partition("=")[2] for w in containers["engines"]["command"] if w.startswith("--port="))
    servers = [f"http://{name}-engines-0-{index}.{name}:{port}" for index in range(engines["completions"])]
    line = containers["trainer"]["command"][-1]
    require(isinstance(line, str), f"the trainer's command ends in {line!r}, no text")  # of None, shlex reads standard input
    command = shlex.split(line)
    check_training(command, chips, servers, "gke_jobset.yaml")
    for key in ("model.checkpoint", "runs_directory"):
        path = settings_of(command)[key]
        require(any(path.startswith(mount + "/") for mount in mounts["trainer"]), f"{key} = {path} is not on the volume")


def main() -> int:
    """Checks every recipe; returns the exit status."""
    try:
        check_tpu_vm(HERE / "tpu_vm.sh")
        check_slurm(HERE / "slurm_gpus.sh")
        with reading("gke_jobset.yaml"):
            manifest = yaml.safe_load((HERE / "gke_jobset.yaml").read_text())
        check_jobset(manifest)
    except BadRecipe as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print("three recipes fit: tpu_vm.sh, slurm_gpus.sh, gke_jobset.yaml (none was run)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
