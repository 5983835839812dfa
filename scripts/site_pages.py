"""Write the pages of the site into build/site_pages.

    python scripts/site_pages.py

Pages are docs/, some files beside it, and two generated references: the commands (their --help) and
the public names of the package. Links to files that are not pages become links to the repository.
"""

import ast
import re
import shutil
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "site_pages"
# Pages of the site that stand elsewhere in the checkout, by their path there.
ELSEWHERE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "report-a-vulnerability.md",
}
# The modules that users import, in the order of the page api.md, with the names that it shows.
API = {
    "mingpt_ddp": "train sweep load LoadedRun history rows at one_line_errors",
    "mingpt_ddp.registry": (
        "register on acts check register_comm_hook ModelConfig PartConfig TaskConfig DataConfig "
        "DatasetConfig ClassesConfig OptimizerConfig ScheduleConfig DataError"
    ),
    "mingpt_ddp.parts": (
        "Attention BlockSpec KVCache CachePosition RotaryAttention causal_attention cross_entropy "
        "dropout relu_squared rms_norm"
    ),
    "mingpt_ddp.models": "ModelProtocol SupportsKVCache SupportsSeveralDevices",
    "mingpt_ddp.tasks": "Task LanguageModel Mean",
    "mingpt_ddp.optim": "declare_state decay_groups",
    "mingpt_ddp.data.rng": "derive_seed feistel_permute",
    "mingpt_ddp.data.samples": "Datasets",
    "mingpt_ddp.distributed": "get_rank get_local_rank get_world_size",
    "mingpt_ddp.loop": (
        "resolve from_mapping Config read_env Runtime build_task plan_batches BatchPlan MicroBatch "
        "build_trainable Trainable TrainStep TrainState Evaluator RunLog process_exit"
    ),
    "mingpt_ddp.metrics.jsonl": "read_history",
    "mingpt_ddp.study.planning": "sizes",
    "mingpt_ddp.errors": "UserError",
}
LINK = re.compile(r"(?P<before>!?\[[^]\n]*(?:\n[^]\n]*)?\]\()(?P<path>[^)\s]+)(?P<after>\))")
CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.DOTALL | re.MULTILINE)


def page_of(path: Path) -> Path | None:
    """Return the page that a file of the checkout becomes. None if it is not a page."""
    relative = path.relative_to(ROOT).as_posix()
    if relative in ELSEWHERE:
        return Path(ELSEWHERE[relative])
    if relative.startswith("docs/"):
        return Path(relative.removeprefix("docs/"))
    return None


def with_links(text: str, source: Path, page: Path, repository: str) -> str:
    """Return a page whose links work on the site.

    Args:
        text: Markdown of the file.
        source: The file.
        page: Path of the page, relative to the folder of pages.
        repository: URL of the repository.

    Raises:
        FileNotFoundError: A link names a file that does not exist.
    """

    def linked(match: re.Match[str]) -> str:
        path, _, anchor = match["path"].partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        target = (source.parent / path).resolve()
        if not target.exists():
            raise FileNotFoundError(f"{source.relative_to(ROOT)} links to {path}")
        other = page_of(target)
        if other is None:
            kind = "tree" if target.is_dir() else "blob"
            new = f"{repository}/{kind}/main/{target.relative_to(ROOT).as_posix()}"
        else:
            new = "../" * len(page.parent.parts) + other.as_posix()
        return match["before"] + new + (f"#{anchor}" if anchor else "") + match["after"]

    parts, end = [], 0
    for code in CODE.finditer(text):
        parts += [LINK.sub(linked, text[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, LINK.sub(linked, text[end:])])


def commands_page() -> str:
    """Return a page with the --help of every command."""
    help_of = {}
    for path in sorted((ROOT / "mingpt_ddp" / "cli" / "commands").glob("[a-z]*.py")):
        help_of[path.stem] = ast.get_docstring(ast.parse(path.read_text()))
    overview = ast.get_docstring(ast.parse((ROOT / "mingpt_ddp" / "cli" / "main.py").read_text()))
    parts = ["# Look up a command", f"```text\n{overview}\n```"]
    parts += [f"## {name}\n\n```text\n{text}\n```" for name, text in help_of.items() if text]
    return "\n\n".join(parts) + "\n"


def api_page() -> str:
    """Return a page that mkdocstrings fills with the signatures and docstrings of public names."""
    parts = ["# Look up a Python name", "[Use it from Python](python.md) shows how to use them."]
    for module, names in API.items():
        parts.append(f"## {module}")
        parts += [f"::: {module}.{name}" for name in names.split()]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """Write all pages anew."""
    package = ConfigParser()
    package.read(ROOT / "setup.cfg")
    repository = package["metadata"]["url"]
    shutil.rmtree(PAGES, ignore_errors=True)
    shutil.copytree(ROOT / "docs", PAGES)
    sources = [*(ROOT / name for name in ELSEWHERE), *(ROOT / "docs").rglob("*.md")]
    for source in sources:
        page = page_of(source)
        assert page is not None
        text = with_links(source.read_text(), source, page, repository)
        if page.name == "index.md":
            # Otherwise its title in the browser would be the name of the site, twice.
            text = f"---\ntitle: Train a small GPT\n---\n\n{text}"
        # A browser would load the library that draws a chart from elsewhere: show its text.
        (PAGES / page).write_text(text.replace("```mermaid", "```text"))
    (PAGES / "commands.md").write_text(commands_page())
    (PAGES / "api.md").write_text(api_page())


if __name__ == "__main__":
    main()
