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
from mingpt_ddp.study.results.formats import duration, fixed
from mingpt_ddp.study.results.objective import LOSS, TEXT_KEYS
from mingpt_ddp.study.results.runs import DIVERGED, is_run, number, read_jobs
from mingpt_ddp.study.results.sequential_record import (
    SequentialComparison,
    SequentialRecord,
    check_seeds,
)
from mingpt_ddp.study.results.stats.significance import MIN_PAIRS
from mingpt_ddp.study.versions.code_version import Version, find_commit, find_version

JOB_KEYS = ("run.seed", "run.root", "run.name")
# Characters that are replaced in the names of directories.
UNSAFE_CHARACTERS = re.compile(r"[^\w.+-]+", re.ASCII)


@dataclass(frozen=True)
class VersionRun:
    """A job of a comparison: a version that trains with a seed, in a run directory."""

    version: Version
    words: list[str]  # run.seed, run.root and run.name, added to the words of the version
    directory: Path
    config: dict[str, Any]  # the configuration that the version composes without `words`

    @property
    def result(self) -> dict[str, Any]:
        return read_result(self.directory)

    @property
    def code(self) -> str:
        """The code that trained the job, as `report` shows it.

        An earlier package may not have recorded it. Then this is the code of the version.
        """
        return describe(recorded_code(self.result) or self.version.code.record)


def compare_versions(
    names: Sequence[str],
    seeds: Sequence[int],
    words: list[str],
    required: str | None,
    until_decided: bool,
    care: float | None,
) -> tuple[str, bool]:
    """Train what is not complete, and add the verdict to experiments.jsonl.

    Args:
        names: Commits, branches or directories. All others are compared with the first.
        words: Words of the train command, the same for all versions.
        required: same_bits, not_worse, or None.
        until_decided: Train no more seeds of a version once it is decided that it is better than
            the first version, or worse, or that the difference is smaller than `care`.
        care: Smallest difference in the loss that matters. None if every difference matters.

    Returns:
        The verdict, and True if it meets the requirement.

    Raises:
        UserError: A version refuses the words, a job has failed, or code, configuration or text
            changed during the comparison.
    """
    if until_decided:  # before anything is written
        check_seeds(len(names), len(seeds))
    commits = [find_commit(name) for name in names]
    versions = [find_version(*each, words) for each in zip(names, commits, strict=True)]
    root, name, configs = _compose(versions)
    jobs: dict[str, list[VersionRun]] = {}
    for nth, (version, config) in enumerate(zip(versions, configs, strict=True), 1):
        label = version.name if names.count(version.name) == 1 else f"{nth}: {version.name}"
        jobs[label] = []
        for seed in seeds:
            readable = UNSAFE_CHARACTERS.sub("_", version.name)
            directory = root / name / f"{nth}-{readable},run.seed={seed}"
            run_words = [f"run.seed={seed}", f"run.root={hydra_value(str(root))}"]
            run_words.append(f'run.name="{name}/{directory.name}"')
            jobs[label].append(VersionRun(version, run_words, directory, config))
    with _lock(root / name):
        comparison = None
        if until_decided:
            rule = SequentialRecord([*jobs], [*map(str, seeds)], None, care)
            comparison = SequentialComparison(root / name, SweepFile(root / name), rule)
        _train(jobs, comparison)
        verdicts, document, text = version_verdict(_settings(jobs), _digests(jobs))
    recorded = {label: each[0].code for label, each in jobs.items()}
    runs = str(root / name)
    record(root, {"runs": [runs], "versions": recorded, "overrides": words, **document})
    text = f"{text}\nthe runs are in {runs}"
    if why := _why_unmet(required, verdicts):
        return f"{text}\nrequire={required}: {why}", False
    return text, True


def _compose(versions: list[Version]) -> tuple[Path, str, list[dict[str, Any]]]:
    """Compose the configuration of each version.

    Returns:
        The run.root of the first version, the name of a directory in it for all jobs, and the
        configurations.

    Raises:
        UserError: A version refuses the words.
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
    """Return the SHA-256 of a text as it is now. Return "" if only the version's code can read it.

    With data.reader, this is the SHA-256 of the files that the reader reads.
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
    """Train the jobs that are not complete, seed by seed: A B, B A, A B and so on.

    Args:
        jobs: The jobs of each version by its label, one for each seed.
        comparison: Decides which versions need more seeds. None if all seeds are trained.

    Raises:
        UserError: A job has failed, was trained with another code or configuration than its version
            has now, or on another text than earlier jobs of its version.
    """
    total = sum(map(len, jobs.values()))
    n_jobs = 0
    # Labels of versions that get no more seeds without a decision: they diverged, or have the same
    # bits as the first version.
    stopped = set[str]()
    texts = dict[str, Any]()  # recorded SHA-256 of the text, by directory of the version
    rounds = zip(*jobs.values(), strict=True)
    for i, jobs_of_seed in enumerate(rounds):
        for label, job in [*zip(jobs, jobs_of_seed, strict=True)][:: -1 if i % 2 else 1]:
            if comparison is not None and not comparison.is_needed(label, stopped):
                continue
            n_jobs += 1
            try:
                _complete(job, f"job {n_jobs} of {total}")
            except UserError:
                if comparison is None or not _has_diverged(job):
                    raise
                if i == 0 and label == comparison.record.reference:
                    seed = comparison.record.seeds[0]
                    raise RunError(f"not decided: seed {seed} of {label} diverged") from None
                stopped.add(label)
                continue
            _check_code(job)
            _check_config(job)
            recorded = job.result.get("data")
            if texts.setdefault(str(job.version.directory), recorded) != recorded:
                raise RunError(
                    f"{job.directory} was trained on another text than the jobs of "
                    f"{job.version.name} before it; run the same command again to compare on the "
                    "text"
                )
            if comparison is not None:
                seed = comparison.record.seeds[i]
                comparison.add(label, seed, job.directory, LOSS.value(job.result))
        if comparison is not None and i + 1 == MIN_PAIRS:
            stopped |= _with_same_bits(jobs, comparison)


def _complete(job: VersionRun, title: str) -> None:
    """Train a job if it is not complete.

    Args:
        title: Number of the job, for the lines that are printed.

    Raises:
        UserError: The job has failed, or is still not complete.
    """
    if job.result.get("status") != RunStatus.COMPLETE:
        job.version.check_unchanged()
        echo_error(f"{title}: {job.version.name}, {job.words[0]}")
        job.version.train(job.words)
        loss = fixed(number(job.result.get("val_loss")), ".4f")
        time = duration(number(job.result.get("wall_seconds"))) or "-"
        echo_error(f"{title}: validation loss {loss} after {time}")
    if job.result.get("status") != RunStatus.COMPLETE:
        raise RunError(f"{job.directory} is not complete; run the same command to go on")


def _has_diverged(job: VersionRun) -> bool:
    """Return True if the loss of a job is not finite."""
    if not is_run(job.directory):  # it failed before it began
        return False
    return any(record.status == DIVERGED for record in read_jobs([job.directory]))


def _with_same_bits(
    jobs: dict[str, list[VersionRun]], comparison: SequentialComparison
) -> set[str]:
    """Return the labels of versions that end with the same bits as the first version.

    The first MIN_PAIRS jobs of each version are compared.
    """
    first = comparison.record.reference
    labels = [label for label in jobs if comparison.is_needed(label)]
    digests = _digests({label: jobs[label][:MIN_PAIRS] for label in labels})

    def bits(label: str) -> list[str | None]:
        return [digests.get(job.directory) for job in jobs[label][:MIN_PAIRS]]

    return {label for label in labels if label != first and bits(label) == bits(first)}


def _check_code(job: VersionRun) -> None:
    """Check that a job was trained by the code that its version has now.

    Files of the user outside of the version, such as a library, must not have changed either.

    Raises:
        RunError: The job was trained by other code.
    """
    code = recorded_code(job.result)
    if not code:  # trained by an earlier version of the package, which recorded no code
        return
    version = job.version
    own = {*version.code.record["files"].values()}
    others = {name: sha256 for name, sha256 in code["files"].items() if sha256 not in own}
    here = Path.cwd()
    changed = {*changed_files({"files": others})}
    for name in others:
        path = Path(name).resolve()
        if path.is_relative_to(here) and not path.is_relative_to(version.directory):
            changed.add(name)
    if code["package"]["sha256"] != version.code.record["package"]["sha256"]:
        changed.add(PACKAGE.name)
    if changed or code.get("earlier"):
        version.check_unchanged()
        names = ", ".join(sorted(changed)) or "several versions of it have"
        raise RunError(
            f"{job.directory} was not trained by the code of {version.name} ({names:.200}): "
            "restore that, or delete the directory and run this again"
        )


def _check_config(job: VersionRun) -> None:
    """Check that a job has trained with the configuration of its version, in all its starts."""
    directory = job.directory
    try:
        recorded = read_yaml(directory / ".hydra" / "config.yaml")
    except (OSError, ValueError):  # a copy may lack hidden files
        return
    changes = difference(job.config, recorded, JOB_KEYS)
    if changes or any(directory.glob("config.*.yaml")):
        change = "; ".join(changes) or "it has config.2.yaml"
        raise RunError(
            f"{directory} was not trained with the configuration of {job.version.name} ({change}): "
            "files of that have changed since; delete the directory, or compare commits"
        )


def _why_unmet(required: str | None, verdicts: list[VersionVerdict]) -> str:
    """Return the reason why a requirement is not met, or "" if it is met."""
    if required == "same_bits" and not all(each.has_same_bits for each in verdicts):
        return "the bits differ"
    if required == "not_worse" and any(each.is_worse for each in verdicts):
        worse = ", ".join(each.other.label for each in verdicts if each.is_worse)
        return f"worse by more than chance, or nothing can be said: {worse}"
    return ""


def _settings(jobs: dict[str, list[VersionRun]]) -> list[Setting]:
    """Return the jobs of each version as a setting."""
    every_job = itertools.chain(*jobs.values())
    directories = [job.directory for job in every_job if job.directory.is_dir()]
    records = {record.directory: record for record in read_jobs(directories)}
    settings = []
    for label, jobs_of_version in jobs.items():
        replicates = [records[job.directory] for job in jobs_of_version if job.directory in records]
        settings.append(Setting(replicates, replicates[0].config, label))
    return settings


def _digests(jobs: dict[str, list[VersionRun]]) -> dict[Path, str]:
    """Return the hashes of the last weights and optimizer states of complete jobs.

    Returns:
        The hashes as JSON, by run directory.
    """
    from mingpt_ddp.snapshots.format import WEIGHT_KINDS
    from mingpt_ddp.snapshots.hashes import hash_snapshot
    from mingpt_ddp.snapshots.read.load import load

    digests = {}
    for job in itertools.chain(*jobs.values()):
        if job.result.get("status") != RunStatus.COMPLETE:
            continue  # a job that was not needed, or has diverged
        hashes = hash_snapshot(load(str(job.directory), WEIGHT_KINDS))
        digests[job.directory] = json.dumps(hashes)
    return digests
