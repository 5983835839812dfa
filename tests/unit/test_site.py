"""Check what the site consists of: its pages, its public names, and the gallery."""

from __future__ import annotations

import pkgutil
import re
import sys
from pathlib import Path
from types import ModuleType

import yaml
from unit.test_public_imports import public_names

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "scripts"))
from site_pages import API, ELSEWHERE  # noqa: E402

GENERATED = ["api.md", "commands.md"]
# Hydra imports this class, because configurations name it. Users never do.
NOT_SHOWN = {"mingpt_ddp.cli.hydra_callbacks.Preflight"}
PICTURES = 8
MAX_PICTURE_BYTES = 150_000
PICTURE = re.compile(r"!\[([^\]]+)\]\(([^)]+)\)")


def leaves(part) -> list[str]:
    """Return the pages in a part of the navigation."""
    if isinstance(part, str):
        return [part]
    return [page for each in (part.values() if isinstance(part, dict) else part)
            for page in leaves(each)]  # fmt: skip


def test_the_navigation_has_each_page_once():
    settings = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=yaml.BaseLoader)
    docs = ROOT / "docs"
    pages = [path.relative_to(docs).as_posix() for path in docs.rglob("*.md")]
    assert sorted(leaves(settings["nav"])) == sorted([*pages, *ELSEWHERE.values(), *GENERATED])


def test_the_reference_shows_the_public_names():
    shown = {f"{module}.{name}" for module, names in API.items() for name in names.split()}
    objects = [pkgutil.resolve_name(name) for name in shown]
    for name in public_names() - NOT_SHOWN:
        value = pkgutil.resolve_name(name)
        is_shown = any(value is each for each in objects)  # perhaps under another module
        assert is_shown or isinstance(value, ModuleType), name
    for name in shown - public_names():
        module, _, attribute = name.rpartition(".")
        exported = pkgutil.resolve_name(module)
        assert attribute in getattr(exported, "__all__", vars(exported)), name


def sections() -> list[str]:
    """Return the sections of the gallery that have a picture."""
    text = (ROOT / "docs" / "gallery.md").read_text()
    return [part for part in re.split(r"^## ", text, flags=re.M) if PICTURE.search(part)]


def test_each_picture_of_the_gallery_has_a_command():
    assert len(sections()) == PICTURES
    for section in sections():
        title = section.splitlines()[0]
        [(description, path)] = PICTURE.findall(section)
        assert description and (ROOT / "docs" / path).stat().st_size < MAX_PICTURE_BYTES, title
        commands = re.findall(r"^```\n(.+?)\n```$", section, flags=re.M | re.S)
        assert commands, f"{title} has no command"
        for script in re.findall(r"python (\S+\.py)", "".join(commands)):
            assert (ROOT / script).is_file(), script


def test_the_gallery_has_no_other_pictures():
    named = {path for section in sections() for _, path in PICTURE.findall(section)}
    kept = (ROOT / "docs" / "gallery").iterdir()
    assert {f"gallery/{path.name}" for path in kept} <= named
