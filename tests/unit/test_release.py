"""What a release needs: one version everywhere, and workflows that run pinned code and make targets
that exist.
"""

from __future__ import annotations

import re
import subprocess
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

import mingpt_ddp

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
CITATION = yaml.load((ROOT / "CITATION.cff").read_text(), Loader=yaml.BaseLoader)


def first_heading() -> tuple[str, str]:
    """Return the version and the date of the newest entry of the changelog."""
    changelog = (ROOT / "CHANGELOG.md").read_text()
    found = re.search(r"^## (\S+) \((.*)\)$", changelog, re.MULTILINE)
    assert found
    return found[1], found[2]


def tags() -> list[str]:
    """Return the tags of this commit that name a version. Without git there are none."""
    command = ["git", "tag", "--points-at", "HEAD", "--list", "v*"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split()
    except OSError:
        return []


def steps(workflow: Path) -> list[dict[str, Any]]:
    """Return the steps of all jobs of a workflow."""
    jobs = yaml.load(workflow.read_text(), Loader=yaml.BaseLoader)["jobs"]
    return [step for job in jobs.values() for step in job["steps"]]


def called(text: str) -> set[str]:
    """Return the make targets that a workflow or a script runs."""
    return set(re.findall(r"(?:^|run: )(?:sudo .*)?\bmake ([a-z][a-z-]*)", text, re.MULTILINE))


def test_the_version_is_the_same_everywhere():
    assert first_heading()[0] == CITATION["version"] == mingpt_ddp.__version__


def test_a_released_version_has_its_date_and_its_tag():
    version, date = first_heading()
    if date == "not released yet":
        assert "date-released" not in CITATION
        assert tags() == []
    else:
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)
        assert CITATION["date-released"] == date
        assert set(tags()) <= {f"v{version}"}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_every_action_is_pinned_by_a_commit_and_says_its_version(workflow):
    lines = [line for line in workflow.read_text().splitlines() if "uses:" in line]
    assert len(lines) == sum("uses" in step for step in steps(workflow)) > 0
    for line in lines:
        assert re.fullmatch(r"\s+(- )?uses: [\w./-]+@[0-9a-f]{40}  # v\d+\.\d+\.\d+", line), line


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_every_workflow_calls_make_targets_that_exist(workflow):
    jobs = yaml.load(workflow.read_text(), Loader=yaml.BaseLoader)["jobs"].values()
    commands = "\n".join(step.get("run", "") for step in steps(workflow))
    included = [row for job in jobs for row in get_matrix(job).get("include", [])]
    targets = called(commands) | {row["target"].split()[0] for row in included}
    assert targets and targets <= TARGETS


def get_matrix(job: dict[str, Any]) -> dict[str, Any]:
    """Return the matrix of a job, which is empty if the job runs once."""
    return job.get("strategy", {}).get("matrix", {})


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_only_read_and_its_jobs_end(workflow):
    content = yaml.load(workflow.read_text(), Loader=yaml.BaseLoader)
    assert content["permissions"] == {"contents": "read"}
    for job in content["jobs"].values():
        assert int(job["timeout-minutes"]) > 0
        if "id-token" in job.get("permissions", {}):
            assert not any("run" in step for step in job["steps"])


def test_both_continuous_integrations_run_the_same_targets():
    github = called((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert called((ROOT / ".ci" / "run").read_text()) <= github & TARGETS


def test_the_workflows_test_the_versions_of_python_in_setup_cfg():
    content = yaml.load((ROOT / ".github/workflows/ci.yml").read_text(), Loader=yaml.BaseLoader)
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    classified = re.findall(r"Python :: (3\.\d+)", setup["metadata"]["classifiers"])
    assert content["jobs"]["test"]["strategy"]["matrix"]["python"] == classified


def test_the_metadata_names_the_site():
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg")
    site = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=yaml.BaseLoader)["site_url"]
    assert f"Documentation = {site}\n" in setup["metadata"]["project_urls"]
    assert CITATION["url"] == site
