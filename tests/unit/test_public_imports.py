"""The public names. Documents, examples and user code in tests use all of them and no others."""

from __future__ import annotations

import ast
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# Public names by module. They never move: if the code moves, the name stays here.
PUBLIC = {
    "mingpt_ddp": (
        "LoadedRun at conf distributed history load loop one_line_errors parts registry rows "
        "sweep train"
    ),
    "mingpt_ddp.data": "rng",
    "mingpt_ddp.data.rng": "derive_seed feistel_permute",
    "mingpt_ddp.data.samples": "Datasets",
    "mingpt_ddp.distributed": "get_local_rank get_rank get_world_size",
    "mingpt_ddp.errors": "UserError",
    "mingpt_ddp.loop": (
        "Config Evaluator RunLog Runtime TrainState TrainStep build_task build_trainable "
        "from_mapping plan_batches process_exit read_env resolve"
    ),
    "mingpt_ddp.metrics.jsonl": "read_history",
    "mingpt_ddp.models": "ModelProtocol SupportsKVCache SupportsSeveralDevices",
    "mingpt_ddp.optim": "declare_state decay_groups",
    "mingpt_ddp.parts": (
        "Attention BlockSpec CachePosition KVCache PartConfig RotaryAttention cross_entropy "
        "dropout rms_norm"
    ),
    "mingpt_ddp.study.planning": "sizes",
    "mingpt_ddp.registry": (
        "ClassesConfig DataConfig DataError DatasetConfig ModelConfig OptimizerConfig PartConfig "
        "ScheduleConfig TaskConfig acts check on register register_comm_hook"
    ),
    "mingpt_ddp.cli.hydra_callbacks": "Preflight",
    "mingpt_ddp.tasks": "LanguageModel Mean Task",
}
IMPORT = re.compile(r"\bfrom (mingpt_ddp[\w.]*) import (?:\(([^)]*)\)|([^\n;#`]+))")
DOTTED = re.compile(r"(?<![\w.-])mingpt_ddp(?:\.[A-Za-z_]\w*)+")
USER_CODE = re.compile(r"^ *(?:import mingpt_ddp$|from mingpt_ddp\.(?:registry|loop) import)", re.M)
MAY_HAVE_USER_CODE = re.compile(r"import mingpt_ddp\b(?!\.)|mingpt_ddp\.(?:registry|loop)")


def public_names() -> set[str]:
    return {f"{module}.{name}" for module, names in PUBLIC.items() for name in names.split()}


def texts() -> Iterator[str]:
    """Yield the texts that users read (documents, examples, presets), and user code in tests."""
    for pattern in ("README.md", "docs/*.md", "examples/**/*.py", "conf/**/*.yaml"):
        yield from (path.read_text() for path in ROOT.glob(pattern))
    for path in ROOT.glob("tests/**/*.py"):
        source = path.read_text()
        is_contract = path.parent.name == "contract"
        if not is_contract and not MAY_HAVE_USER_CODE.search(source):
            continue
        for node in ast.walk(ast.parse(source)):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and (is_contract or USER_CODE.search(text)):
                yield text


def used_names() -> set[str]:
    names = set()
    for text in texts():
        for module, several, one in IMPORT.findall(text):
            for name in (several or one).split(","):
                if name.strip(" \n*"):
                    names.add(f"{module}.{name.split()[0]}")
        names |= {*DOTTED.findall(IMPORT.sub("", text))}
    return names


def test_names_that_users_import_are_the_listed_names():
    assert used_names() == public_names()


def test_listed_names_can_be_imported():
    for name in sorted(public_names()):
        pkgutil.resolve_name(name)
