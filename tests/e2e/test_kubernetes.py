"""Check that the Kubernetes manifest agrees with the program.

The exit codes of the pods must distinguish errors from preemption. Two processes take the place of
the pods, with the variables that the Kubeflow operator sets. docs/kubernetes.md describes how the
manifest handles the exit codes.
"""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from launching import ROOT, TINY, Job, committed, last_step, python_main, wait_for
from ports import free_port
from runs import read_result, succeed

PREEMPTED = 143
RUNTIME, JOB = yaml.safe_load_all((ROOT / "scripts" / "kubernetes.yaml").read_text())
[PODS] = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"]
POD = PODS["template"]["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]
TRAINER = JOB["spec"]["trainer"]


def validation_errors(document: dict[str, Any]) -> list[str]:
    """Return the errors of a document: fields that the published models reject or do not know."""
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed"
    )
    model = getattr(models, f"TrainerV1alpha1{document['kind']}")
    try:
        parsed = model.from_dict(copy.deepcopy(document)).to_dict()
    except ValueError as error:
        return [line.strip() for line in str(error).splitlines()[1:]]
    return sorted(scalars(document) - scalars(parsed))


def scalars(value: Any, path: str = "") -> set[str]:
    """Return every scalar of a document as a string with its path."""
    if isinstance(value, dict) and value:
        return {scalar for key, each in value.items() for scalar in scalars(each, f"{path}.{key}")}
    if isinstance(value, list) and value:
        return {
            scalar
            for index, each in enumerate(value)
            for scalar in scalars(each, f"{path}[{index}]")
        }
    return {f"{path}={value!r}"}


@pytest.mark.integration
@pytest.mark.parametrize("document", [RUNTIME, JOB], ids=lambda document: document["kind"])
def test_the_manifest_is_valid_for_the_operator_and_kubernetes(document):
    assert validation_errors(document) == []


@pytest.mark.integration
@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("spec.trainer.numNode", 2, ".spec.trainer.numNode=2"),
        ("spec.trainer.numNodes", "2", "numNodes"),
        ("spec.trainer.args", {}, "args"),
        ("spec.runtimeRef", {"kind": "TrainingRuntime"}, "name"),
        (
            "spec.trainer.resourcesPerNode.limit",
            {"memory": "1Gi"},
            ".spec.trainer.resourcesPerNode.limit.memory='1Gi'",
        ),
    ],
)
def test_an_invalid_manifest_is_detected(path, value, expected):
    invalid = copy.deepcopy(JOB)
    *parents, last = path.split(".")
    node = invalid
    for parent in parents:
        node = node[parent]
    node[last] = value
    assert expected in validation_errors(invalid)[0]


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> dict[str, Any]:
    """Compose the configuration of the command in the manifest."""
    command = [*python_main(), *TRAINER["args"], "--cfg", "job"]
    return yaml.safe_load(succeed(command, tmp_path_factory.mktemp("config")))


def test_the_command_of_the_manifest_is_a_valid_configuration(config):
    ranks = TRAINER["numProcPerNode"]
    assert config["ddp"]["nproc_per_node"] == ranks
    assert TRAINER["resourcesPerNode"]["limits"]["nvidia.com/gpu"] == str(ranks)
    assert (
        config["trainer"]["batch_size"] // config["trainer"]["micro_batch_size"]
        >= ranks * TRAINER["numNodes"]
    )
    assert config["run"]["name"] == JOB["metadata"]["name"]
    assert config["snapshot"]["path"].startswith("s3://")
    assert TRAINER["command"] == ["python", "main.py"]
    assert JOB["spec"]["runtimeRef"]["name"] == RUNTIME["metadata"]["name"]
    assert config["snapshot"]["grace_seconds"] + 20 <= POD["terminationGracePeriodSeconds"]


def test_the_exit_codes_of_the_manifest_equal_those_of_the_program(config):
    rules = PODS["template"]["spec"]["podFailurePolicy"]["rules"]
    by_code = {
        code: rule["action"]
        for rule in rules
        for code in rule.get("onExitCodes", {}).get("values", [])
    }
    assert by_code == {
        config["ddp"]["preempted_exit_code"]: "Ignore",
        1: "FailJob",
        2: "FailJob",
    }
    assert POD["restartPolicy"] == "Never"


def test_runs_are_written_to_a_volume_and_the_manifest_has_no_secret(config):
    mounts = {mount["mountPath"]: mount["name"] for mount in CONTAINER["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert {"/runs", "/scratch", "/dev/shm"} == set(mounts)
    assert set(mounts.values()) == set(volumes)
    assert "persistentVolumeClaim" in volumes[mounts[config["run"]["root"]]]
    assert Path(config["data"]["cache_dir"]).is_relative_to("/scratch")
    assert not [each for each in TRAINER["env"] if re.search("KEY|SECRET|TOKEN|PASS", each["name"])]
    assert "secretRef" in CONTAINER["envFrom"][0]


def pod(cwd: Path, index: int, pods: int, port: int, *overrides: str) -> Job:
    """Start a process as a pod of a job, with the environment that the operator sets."""
    variables = {
        "PET_NNODES": str(pods),
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": str(index),
        "PET_MASTER_ADDR": "127.0.0.1",
        "PET_MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    options = [
        "ddp.nproc_per_node=1",
        "ddp.preempted_exit_code=143",
        "run.name=pods",
        "trainer.eval_every=null",
    ]
    return Job(
        [sys.executable, str(ROOT / "main.py"), *TINY, *options, *overrides], cwd, **variables
    )


@pytest.mark.parametrize("evicted", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_an_evicted_pod_stops_both_pods_which_resume(evicted, tmp_path):
    run, port = tmp_path / "outputs" / "pods", free_port()
    pods = [pod(tmp_path, index, 2, port, "trainer.max_steps=100000") for index in (0, 1)]
    wait_for(lambda: committed(run), what="a snapshot")
    pods[evicted].process.terminate()
    assert [job.wait() for job in pods] == [PREEMPTED, PREEMPTED], pods[0].text()
    preempted = read_result(run)
    assert (preempted["status"], preempted["world_size"]) == ("preempted", 2)
    assert committed(run)[-1] == preempted["step"]
    limit = f"trainer.max_steps={preempted['step'] + 2}"
    restarted = [pod(tmp_path, index, 2, port, limit) for index in (0, 1)]
    assert [job.wait() for job in restarted] == [0, 0], restarted[0].text()
    assert f"resuming from the snapshot of step {preempted['step']}" in restarted[0].text()


def test_a_killed_and_recreated_pod_joins_the_other(tmp_path):
    run, port = tmp_path / "outputs" / "pods", free_port()
    overrides = ["trainer.max_steps=100000", "ddp.timeout_s=30"]
    first, second = [pod(tmp_path, index, 2, port, *overrides) for index in (0, 1)]
    wait_for(lambda: committed(run), what="a snapshot")
    second.kill_tree()
    before = last_step(run)
    second = pod(tmp_path, 1, 2, port, *overrides)
    wait_for(lambda: last_step(run) > before + 20, what="steps after the restart")
    second.process.terminate()
    assert [first.wait(), second.wait()] == [PREEMPTED, PREEMPTED], first.text()


def test_a_single_pod_starts_its_own_ranks(tmp_path):
    job = pod(tmp_path, 0, 1, free_port(), "ddp.nproc_per_node=2")
    assert job.wait() == 0, job.text()
    result = read_result(tmp_path / "outputs" / "pods")
    assert (result["status"], result["world_size"]) == ("complete", 2)


def test_a_configuration_error_is_final(tmp_path):
    job = pod(tmp_path, 0, 1, free_port(), "optimizer.lr=-1")
    assert job.wait() == 2, job.text()
    assert "config error: optimizer.lr=-1 must be greater than or equal to 1e-30" in job.text()
    assert not (tmp_path / "outputs").exists()
