"""Train versions of the code with the same seeds, and compare their runs."""

import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import yaml

from mingpt_ddp.config.compose.hydra_utils import hydra_value
from mingpt_ddp.config.job import RunStatus
from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.errors import RunError, UserError
from mingpt_ddp.process.terminal import echo_error
from mingpt_ddp.storage.code_identity import PACKAGE, changed_files, describe, recorded_code
from mingpt_ddp.storage.lease import LockedError
from mingpt_ddp.storage.lock import acquire_lock
from mingpt_ddp.storage.run_directory import difference, read_result
from mingpt_ddp.storage.sweep_file import SweepFile
from mingpt_ddp.storage.yaml_and_json import read_yaml
from mingpt_ddp.study.results.analysis.compare import Setting
from mingpt_ddp.study.results.analysis.version_verdict import VersionVerdict, version_verdict
from mingpt_ddp.study.results.experiments import record
from mingpt_ddp.study.results.formats import duration, format_number
from mingpt_ddp.study.results.objective import LOSS, TEXT_KEYS
from mingpt_ddp.study.results.runs import DIVERGED, is_run, number, read_jobs
from mingpt_ddp.study.results.sequential_record import (
    SequentialComparison,
    SequentialRecord,
    check_seeds,
)
from mingpt_ddp.study.results.stats.significance import MIN_PAIRS
from mingpt_ddp.study.versions.code_version import Version, find_commit, find_version

JOB_KEYS = ("run.seed", "run.root", "run.name")  # keys that differ from job to job
# Characters that are replaced in the names of directories.
UNSAFE_CHARACTERS = re.compile(r"[^\w.+-]+", re.ASCII)


@dataclass(frozen=True)
class VersionRun:
    """A job of a comparison: one version trains with one seed, in one run directory."""

    version: Version
    overrides: list[str]  # values of JOB_KEYS, which are added to the arguments of the version
    directory: Path
    config: dict[str, Any]  # configuration that the version composes without `overrides`

    @property
    def result(self) -> dict[str, Any]:
        return read_result(self.directory)

    @property
    def code(self) -> str:
        """The code that trained the job, as the report shows it.

        Earlier versions of the package did not record their code. For them, this is the present
        code of `version`.
        """
        return describe(recorded_code(self.result) or self.version.code.record)


def compare_versions(
    names: Sequence[str],
    seeds: Sequence[int],
    arguments: list[str],
    required: str | None,
    until_decided: bool,
    smallest_relevant: float | None,
) -> tuple[str, bool]:
    """Train several versions with the same seeds, and compare them. Record the verdict.

    Jobs that are already complete are not trained again. The verdict is added to experiments.jsonl.

    Args:
        names: Names of the versions: commits, branches or directories. Each version is compared
            with the first one.
        arguments: Arguments of the train command, the same for all versions.
        required: The requirement that the verdict has to meet: same_bits, not_worse, or None.
        until_decided: Train no more seeds of a version once it is known to be better than the first
            version, or worse, or different by less than `smallest_relevant`.
        smallest_relevant: Smallest difference in the loss that matters. None if every difference
            matters.

    Returns:
        The verdict as text, and True if it meets the requirement.

    Raises:
        UserError: A version refuses the arguments, a job has failed, or code, configuration or text
            has changed during the comparison.
    """
    if until_decided:  # checked first, before anything is written
        check_seeds(len(names), len(seeds))
    commits = [find_commit(name) for name in names]
    versions = [find_version(*each, arguments) for each in zip(names, commits, strict=True)]
    root, name, configs = _compose(versions)
    jobs: dict[str, list[VersionRun]] = {}
    for nth, (version, config) in enumerate(zip(versions, configs, strict=True), 1):
        label = version.name if names.count(version.name) == 1 else f"{nth}: {version.name}"
        jobs[label] = []
        for seed in seeds:
            readable = UNSAFE_CHARACTERS.sub("_", version.name)
            directory = root / name / f"{nth}-{readable},run.seed={seed}"
            overrides = [f"run.seed={seed}", f"run.root={hydra_value(str(root))}"]
            overrides.append(f'run.name="{name}/{directory.name}"')
            jobs[label].append(VersionRun(version, overrides, directory, config))
    with _lock(root / name):
        comparison = None
        if until_decided:
            rule = SequentialRecord([*jobs], [*map(str, seeds)], None, smallest_relevant)
            comparison = SequentialComparison(root / name, SweepFile(root / name), rule)
        _train(jobs, comparison)
        verdicts, document, text = version_verdict(_settings(jobs), _digests(jobs))
    recorded = {label: each[0].code for label, each in jobs.items()}
    runs = str(root / name)
    record(root, {"runs": [runs], "versions": recorded, "overrides": arguments, **document})
    text = f"{text}\nthe runs are in {runs}"
    if why := _why_unmet(required, verdicts):
        return f"{text}\nrequire={required} is not met: {why}", False
    return text, True


def _compose(versions: list[Version]) -> tuple[Path, str, list[dict[str, Any]]]:
    """Compose the configuration of each version.

    Returns:
        The run.root of the first version, the name of the directory in it that holds all jobs, and
        the configuration of each version.

    Raises:
        UserError: A version refuses the arguments.
    """
    composed = [version.compose() for version in versions]
    configs = [*map(yaml.safe_load, composed)]
    compared = []
    for version, yaml_text, config in zip(versions, composed, configs, strict=True):
        code = version.code
        compared.append([code.record, code.patch.hex(), yaml_text, _text_sha256(config["data"])])
    digest = hashlib.sha256(json.dumps(compared, sort_keys=True).encode()).hexdigest()[:8]
    return Path(configs[0]["run"]["root"]), f"versions-{digest}", configs


def _text_sha256(data: Mapping[str, Any]) -> str:
    """Compute the SHA-256 of the text as it is now. Return "" if only the version can read it.

    With data.reader, hash the files that the reader reads.
    """
    from mingpt_ddp.data.prepare import sha256_of_text

    values = {key: data[key] for key in TEXT_KEYS if data.get(key) is not None}
    if values.pop("reader", None):
        values["format"] = "text"
    try:
        return sha256_of_text(DataConfig(**values))
    except UserError:  # if the version cannot read the text either, its first job reports why
        return ""


def _lock(directory: Path) -> IO[str]:
    """Lock the directory of a comparison.

    Raises:
        LockedError: Another process runs the same comparison.
    """
    try:
        return acquire_lock(directory, 0.0, what="the directory of the comparison")
    except LockedError as error:
        raise LockedError(directory, error.owner, "wait for it, then run this again") from error


def _train(jobs: dict[str, list[VersionRun]], comparison: SequentialComparison | None) -> None:
    """Train the incomplete jobs seed by seed, and alternate the order of versions: A B, B A, A B.

    Args:
        jobs: The jobs of each version, one for each seed, by the label of the version.
        comparison: Decides which versions need more seeds. None to train all seeds.

    Raises:
        UserError: A job has failed. Or its code or configuration differs from the present one of
            its version, or its text differs from the text of earlier jobs of its version.
    """
    total = sum(map(len, jobs.values()))
    n_jobs = 0
    # Labels of versions that get no more seeds although nothing is decided. They have diverged, or
    # have the same bits as the first version.
    stopped = set[str]()
    texts = dict[str, Any]()  # record of the text, by the directory of the version
    rounds = zip(*jobs.values(), strict=True)
    for i, jobs_of_seed in enumerate(rounds):
        for label, job in [*zip(jobs, jobs_of_seed, strict=True)][:: -1 if i % 2 else 1]:
            if comparison is not None and not comparison.needs_more_seeds(label, stopped):
                continue
            n_jobs += 1
            try:
                _complete(job, f"job {n_jobs} of {total}")
            except UserError:
                if comparison is None or not _has_diverged(job):
                    raise
                if i == 0 and label == comparison.record.reference:
                    seed = comparison.record.seeds[0]
                    raise RunError(
                        f"not decided: seed {seed} of {label} diverged, so that no version can be "
                        "compared with it; choose other seeds"
                    ) from None
                stopped.add(label)
                continue
            _check_code(job)
            _check_config(job)
            recorded = job.result.get("data")
            if texts.setdefault(str(job.version.directory), recorded) != recorded:
                raise RunError(
                    f"{job.directory} was trained on a text that differs from the text of "
                    f"earlier jobs of {job.version.name}; run the same command again to compare "
                    "all versions on the new text"
                )
            if comparison is not None:
                seed = comparison.record.seeds[i]
                comparison.add(label, seed, job.directory, LOSS.value(job.result))
        if comparison is not None and i + 1 == MIN_PAIRS:
            stopped |= _with_same_bits(jobs, comparison)


def _complete(job: VersionRun, title: str) -> None:
    """Train a job if it is not complete.

    Args:
        title: Names the job by its number, in the printed lines.

    Raises:
        UserError: The job has failed, or is still not complete.
    """
    if job.result.get("status") != RunStatus.COMPLETE:
        job.version.check_unchanged()
        echo_error(f"{title}: {job.version.name}, {job.overrides[0]}")
        job.version.train(job.overrides)
        loss = format_number(number(job.result.get("val_loss")), ".4f")
        time = duration(number(job.result.get("wall_seconds"))) or "-"
        echo_error(f"{title}: validation loss {loss} after {time}")
    if job.result.get("status") != RunStatus.COMPLETE:
        raise RunError(
            f"{job.directory} is not complete; run the same command again to continue it"
        )


def _has_diverged(job: VersionRun) -> bool:
    """Return True if the loss of a job is not finite."""
    if not is_run(job.directory):  # the job failed before it began to train
        return False
    return any(record.status == DIVERGED for record in read_jobs([job.directory]))


def _with_same_bits(
    jobs: dict[str, list[VersionRun]], comparison: SequentialComparison
) -> set[str]:
    """Find the versions whose results have the same bits as the first version's results.

    The first MIN_PAIRS jobs of each version are compared.

    Returns:
        The labels of these versions.
    """
    first = comparison.record.reference
    labels = [label for label in jobs if comparison.needs_more_seeds(label)]
    digests = _digests({label: jobs[label][:MIN_PAIRS] for label in labels})

    def bits(label: str) -> list[str | None]:
        return [digests.get(job.directory) for job in jobs[label][:MIN_PAIRS]]

    return {label for label in labels if label != first and bits(label) == bits(first)}


def _check_code(job: VersionRun) -> None:
    """Check that a job was trained by the code that its version has now.

    Files of the user outside of the version, such as a library, must also be unchanged.

    Raises:
        RunError: The job was trained by different code.
    """
    code = recorded_code(job.result)
    if not code:  # an earlier version of the package, which recorded no code, trained the job
        return
    version = job.version
    own = {*version.code.record["files"].values()}
    other_files = {name: sha256 for name, sha256 in code["files"].items() if sha256 not in own}
    here = Path.cwd()
    changed = {*changed_files({"files": other_files})}
    for name in other_files:
        path = Path(name).resolve()
        if path.is_relative_to(here) and not path.is_relative_to(version.directory):
            changed.add(name)
    if code["package"]["sha256"] != version.code.record["package"]["sha256"]:
        changed.add(PACKAGE.name)
    if changed or code.get("earlier"):
        version.check_unchanged()
        change = "the code changed between two starts of the job"
        if changed:
            change = f"changed: {', '.join(sorted(changed))}"
        raise RunError(
            f"{job.directory} was not trained with the present code of {version.name} "
            f"({change:.200}); restore the code that trained it, or delete the directory and run "
            "the command again"
        )


def _check_config(job: VersionRun) -> None:
    """Check that a job has trained with the configuration of its version at each of its starts."""
    directory = job.directory
    try:
        recorded = read_yaml(directory / ".hydra" / "config.yaml")
    except (OSError, ValueError):  # a copy of the directory may lack hidden files
        return
    changes = difference(job.config, recorded, JOB_KEYS)
    if changes or any(directory.glob("config.*.yaml")):
        change = "; ".join(changes) or "a later start changed it: see config.2.yaml"
        raise RunError(
            f"{directory} was not trained with the configuration that {job.version.name} has now "
            f"({change}); delete the directory to train the job again. Files of a commit cannot "
            "change, so compare commits if you go on editing"
        )


def _why_unmet(required: str | None, verdicts: list[VersionVerdict]) -> str:
    """Explain why a requirement is not met. Return "" if it is met."""
    if required == "same_bits" and not all(each.has_same_bits for each in verdicts):
        return "the weights or optimizer states differ"
    if required == "not_worse" and any(each.is_worse for each in verdicts):
        worse = ", ".join(each.other.label for each in verdicts if each.is_worse)
        return f"worse by more than chance, or not comparable: {worse}"
    return ""


def _settings(jobs: dict[str, list[VersionRun]]) -> list[Setting]:
    """Represent each version as a `Setting`, whose jobs differ only in their seed."""
    every_job = itertools.chain(*jobs.values())
    directories = [job.directory for job in every_job if job.directory.is_dir()]
    records = {record.directory: record for record in read_jobs(directories)}
    settings = []
    for label, jobs_of_version in jobs.items():
        replicates = [records[job.directory] for job in jobs_of_version if job.directory in records]
        settings.append(Setting(replicates, replicates[0].config, label))
    return settings


def _digests(jobs: dict[str, list[VersionRun]]) -> dict[Path, str]:
    """Hash the last weights and optimizer states of all complete jobs.

    Returns:
        The hashes of each job as JSON, by run directory.
    """
    from mingpt_ddp.snapshots.format import WEIGHT_KINDS
    from mingpt_ddp.snapshots.hashes import hash_snapshot
    from mingpt_ddp.snapshots.read.load import load

    digests = {}
    for job in itertools.chain(*jobs.values()):
        if job.result.get("status") != RunStatus.COMPLETE:
            continue  # the job was not needed, or has diverged
        hashes = hash_snapshot(load(str(job.directory), WEIGHT_KINDS))
        digests[job.directory] = json.dumps(hashes)
    return digests
