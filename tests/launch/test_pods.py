"""The recipes for pods fit together, and the check that says so notices when they do not."""

import copy
import shutil
from pathlib import Path

import pytest
import yaml

from launch.pods import check

JOBSET = yaml.safe_load((check.HERE / "gke_jobset.yaml").read_text())


def test_the_recipes_are_sound(capsys):
    assert check.main() == 0
    assert "none was run" in capsys.readouterr().out


def test_what_was_not_run_says_so():
    for path in (check.HERE / "tpu_vm.sh", check.HERE / "slurm_gpus.sh", check.HERE / "gke_jobset.yaml"):
        assert "# NOT RUN BY US" in path.read_text()


def put(value, *path):
    """A change of the JobSet at a path."""

    def change(manifest):
        for key in path[:-1]:
            manifest = manifest[key]
        manifest[path[-1]] = value

    return change


ENGINES = ("spec", "replicatedJobs", 0, "template", "spec")
TRAINER = ("spec", "replicatedJobs", 1, "template", "spec")
POD = ("template", "spec")
COMMAND = JOBSET["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["spec"]["containers"][0]["command"][-1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("Job", "kind"), "not a JobSet"),
        (put(False, "spec", "network", "enableDNSHostnames"), "host names"),
        (put(["engines"], "spec", "successPolicy", "targetReplicatedJobs"), "engines never end"),
        (put(3, *TRAINER, "parallelism"), "all pods at once"),
        (put(6, *TRAINER, "backoffLimit"), "restarted alone"),
        (put("OnFailure", *ENGINES, *POD, "restartPolicy"), "restartPolicy must be Never"),
        (put("4x4x4", *TRAINER, *POD, "nodeSelector", "cloud.google.com/gke-tpu-topology"), "for a slice of 64"),
        (put(8, *TRAINER, *POD, "containers", 0, "resources", "limits", "google.com/tpu"), "4 chips a pod"),
        (put("/elsewhere", *ENGINES, *POD, "containers", 0, "volumeMounts", 0, "mountPath"), "see other directories"),
        (put(4, *ENGINES, "completions"), "all pods at once"),
        (put(COMMAND.replace("engines-0-7", "engines-0-8"), *TRAINER, *POD, "containers", 0, "command", 2), "trains against"),
        (put(COMMAND.replace("mesh.fsdp=8", "mesh.fsdp=4"), *TRAINER, *POD, "containers", 0, "command", 2), r"mesh of \[1, 4, 1\] for 8 devices"),
        (put(COMMAND.replace("rows_per_microbatch=8", "rows_per_microbatch=12"), *TRAINER, *POD, "containers", 0, "command", 2), "12 rows"),
        (put(COMMAND.replace("mesh.fsdp", "mesh.fsdq"), *TRAINER, *POD, "containers", 0, "command", 2), "no such key"),
        (put(COMMAND.replace("/mnt/intraskill/runs", "/tmp/runs"), *TRAINER, *POD, "containers", 0, "command", 2), "not on the volume"),
        (lambda manifest: manifest["spec"].pop("failurePolicy"), "lacks 'failurePolicy'"),
    ],
)
def test_a_jobset_that_could_not_work_is_refused(change, words):
    manifest = copy.deepcopy(JOBSET)
    change(manifest)
    with pytest.raises(check.BadRecipe, match=words):
        check.check_jobset(manifest)


def places(value, path=()):
    yield path
    for key, part in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(part, (*path, key))


@pytest.mark.parametrize("value", [None, 7, True, "", '"', [], {}, "gone"])
def test_a_jobset_of_any_form_is_refused_or_fits(value):
    """Whatever stands at whichever place: never another error."""
    refused = 0
    for path in places(JOBSET):
        manifest = copy.deepcopy(JOBSET)
        parent = manifest
        for key in path[:-1]:
            parent = parent[key]
        if not path:
            manifest = value
        elif value == "gone":
            del parent[path[-1]]
        else:
            parent[path[-1]] = value
        try:
            check.check_jobset(manifest)
        except check.BadRecipe as error:
            assert str(error).count("\n") == 0
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("text", ["a: [", "7", "", "\x00", "- a"])
def test_a_file_that_is_no_jobset_is_one_line(tmp_path, monkeypatch, capsys, text):
    for path in check.HERE.glob("*.sh"):
        shutil.copy(path, tmp_path)
    (tmp_path / "gke_jobset.yaml").write_text(text)
    monkeypatch.setattr(check, "HERE", tmp_path)
    assert check.main() == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and error.count("\n") == 1


def altered(tmp_path: Path, name: str, old: str, new: str) -> Path:
    path = shutil.copy(check.HERE / name, tmp_path / name)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    return path


def test_a_script_that_could_not_work_is_refused(tmp_path):
    with pytest.raises(check.BadRecipe, match="bash -n"):
        check.check_tpu_vm(altered(tmp_path, "tpu_vm.sh", "esac", ""))
    with pytest.raises(check.BadRecipe, match="mesh of"):
        check.check_tpu_vm(altered(tmp_path, "tpu_vm.sh", "v5p-16", "v5p-32"))
    with pytest.raises(check.BadRecipe, match="no such key"):
        check.check_slurm(altered(tmp_path, "slurm_gpus.sh", "engine.shares_memory", "engine.shares"))
    with pytest.raises(check.BadRecipe, match="memory is shared"):
        check.check_slurm(altered(tmp_path, "slurm_gpus.sh", "--enable-memory-saver ", ""))
    with pytest.raises(check.BadRecipe, match="trains against"):
        check.check_slurm(altered(tmp_path, "slurm_gpus.sh", "--port $((PORT + gpu))", "--port $PORT"))
    with pytest.raises(check.BadRecipe, match="not of the form"):
        check.check_tpu_vm(altered(tmp_path, "tpu_vm.sh", "--accelerator-type=", "--accelerator="))
    with pytest.raises(check.BadRecipe, match="not of the form"):
        check.check_slurm(altered(tmp_path, "slurm_gpus.sh", '--nodelist="$node"', ""))


def test_without_arguments_nothing_is_run(tmp_path):
    import subprocess

    done = subprocess.run(["bash", str(check.HERE / "tpu_vm.sh")], capture_output=True, text=True, env={"PATH": "/usr/bin:/bin"})
    assert done.returncode != 0 and "set PROJECT" in done.stderr and not done.stdout
