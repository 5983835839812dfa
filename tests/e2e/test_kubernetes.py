"""The manifest for Kubernetes agrees with the program, and its pods tell their operator what to do next.

Two processes stand for the pods, with the variables that the training operator sets; what it makes of their exit codes
(128 and more: a new pod; 1 to 127: the job has failed) is in docs/kubernetes.md.
"""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from launching import ROOT, TINY, Job, committed, wait_for
from s3_server import free_ports

from mingpt_ddp.config.config import Config, from_mapping, to_plain
from mingpt_ddp.config.hydra_utils import config_directory

AGAIN = 143
JOB = yaml.safe_load((ROOT / "scripts" / "pytorchjob.yaml").read_text())
[REPLICAS] = JOB["spec"]["pytorchReplicaSpecs"].values()
POD = REPLICAS["template"]["spec"]
[CONTAINER] = POD["containers"]


def configuration() -> Config:
    """What the command line of the manifest composes to, after Kubernetes has put in the variables."""
    variables = {each["name"]: each["value"] for each in CONTAINER["env"]}
    words = [re.sub(r"\$\((\w+)\)", lambda name: variables[name[1]], word) for word in CONTAINER["args"]]
    with initialize_config_dir(str(config_directory()), version_base="1.3"):
        return from_mapping(to_plain(compose("config", words)))


def test_the_manifest_is_what_the_operator_and_kubernetes_know():
    manifest = pytest.importorskip("manifest", reason="kubeflow-training is not installed")
    assert manifest.complaints(JOB, "KubeflowOrgV1PyTorchJob") == []


@pytest.mark.parametrize(
    ("path", "value", "expected"),
    [
        ("spec.elasticPolicy.minReplica", 2, ".spec.elasticPolicy.minReplica: not known to KubeflowOrgV1ElasticPolicy"),
        ("spec.elasticPolicy.maxReplicas", "2", ".spec.elasticPolicy.maxReplicas: '2' is not int"),
        ("spec.nprocPerNode", 4, ".spec.nprocPerNode: 4 is not str"),
        ("spec.runPolicy", [], ".spec.runPolicy: [] is not a mapping"),
        ("spec.pytorchReplicaSpecs.Worker.template.spec.containers", {}, "...containers: {} is not a list"),
        ("spec.pytorchReplicaSpecs", None, ".spec: Invalid value for `pytorch_replica_specs`, must not be `None`"),
    ],
)
def test_the_check_of_the_manifest_can_fail(path, value, expected):
    manifest = pytest.importorskip("manifest", reason="kubeflow-training is not installed")
    broken = copy.deepcopy(JOB)
    *parents, last = path.split(".")
    place = broken
    for parent in parents:
        place = place[parent]
    place[last] = value
    if value is None:
        del place[last]
    (told,) = manifest.complaints(broken, "KubeflowOrgV1PyTorchJob")
    assert told.endswith(expected.removeprefix("..."))


def test_the_command_of_the_manifest_is_a_valid_configuration():
    config = configuration()
    elastic, ranks = JOB["spec"]["elasticPolicy"], int(JOB["spec"]["nprocPerNode"])
    assert elastic["minReplicas"] == elastic["maxReplicas"] == REPLICAS["replicas"]
    assert CONTAINER["resources"]["limits"]["nvidia.com/gpu"] == str(ranks)
    assert config.trainer.batch_size // config.trainer.micro_batch_size >= ranks * REPLICAS["replicas"]
    assert config.run.name == JOB["metadata"]["name"]
    assert config.snapshot.path.startswith("s3://")
    assert all((ROOT / word).exists() for word in CONTAINER["command"] if word.endswith(".py"))


def test_each_has_longer_than_those_it_waits_for():
    [shutdown] = [word for word in CONTAINER["command"] if word.startswith("--shutdown-timeout=")]
    ranks, agent = configuration().snapshot.grace_seconds, int(shutdown.partition("=")[2])
    assert ranks + 5 <= agent <= POD["terminationGracePeriodSeconds"] - 5


def test_what_is_written_lies_on_a_volume_and_no_secret_in_the_manifest():
    config = configuration()
    mounts = {mount["mountPath"]: mount["name"] for mount in CONTAINER["volumeMounts"]}
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert {"/runs", "/scratch", "/dev/shm"} == set(mounts)
    assert set(mounts.values()) == set(volumes)
    assert "persistentVolumeClaim" in volumes[mounts[config.run.root]]
    assert Path(config.data.cache_dir).is_relative_to("/scratch")
    assert not [each for each in CONTAINER["env"] if re.search("KEY|SECRET|TOKEN|PASS", each["name"])]
    assert "secretRef" in CONTAINER["envFrom"][0]


def pod(cwd: Path, pods: int, port: int, *words: str, first: bool = True) -> Job:
    """One of the pods of a job, with the manifest's command and what the operator adds to it.

    Args:
        first: the one that has the rendezvous; on one machine each would take itself for it.
    """
    command = [sys.executable, str(ROOT / "scripts" / "pod.py"), *CONTAINER["command"][2:-1], str(ROOT / "main.py")]
    variables = {
        "PET_RDZV_BACKEND": JOB["spec"]["elasticPolicy"]["rdzvBackend"],
        "PET_RDZV_ENDPOINT": f"127.0.0.1:{port}",
        "PET_RDZV_CONF": f"is_host={str(first).lower()}",
        "PET_NNODES": f"{pods}:{pods}",
        "PET_NPROC_PER_NODE": "1",
        "PET_MAX_RESTARTS": "0",
        "PET_LOCAL_ADDR": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    return Job([*command, *TINY, "run.name=pods", "trainer.eval_every=null", *words], cwd, **variables)


def test_an_evicted_pod_stops_both_to_begin_again(tmp_path):
    """torchrun would leave with 1 in the pod that is told to go and with 0, as if all were done, in the other."""
    run, [port] = tmp_path / "outputs" / "pods", free_ports(1)
    first, second = [pod(tmp_path, 2, port, "trainer.max_steps=100000", first=first) for first in (True, False)]
    try:
        wait_for(lambda: committed(run), what="a snapshot")
        second.process.terminate()
        assert [second.wait(), first.wait()] == [AGAIN, AGAIN], first.text()
    finally:
        for job in (first, second):
            if job.process.poll() is None:
                job.kill_tree()
    preempted = json.loads((run / "result.json").read_text())
    assert preempted["status"] == "preempted"
    again = pod(tmp_path, 1, port, f"trainer.max_steps={preempted['step'] + 2}")
    assert again.wait() == 0, again.text()
    assert f"resuming from the snapshot of step {preempted['step']}" in again.text()


def test_a_configuration_error_is_final(tmp_path):
    only = pod(tmp_path, 1, free_ports(1)[0], "optimizer.lr=-1")
    assert only.wait() == 2, only.text()
    assert "config error: optimizer.lr=-1.0 must be greater than 0" in only.text()
    assert not (tmp_path / "outputs").exists()
