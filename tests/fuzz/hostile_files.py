"""Make files that no command should trust, and a working directory with valid files."""

from __future__ import annotations

import functools
import gzip
import io
import json
import os
import pickle
import random
import shutil
import socket
import stat
import tarfile
import zipfile
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
FORMAT2 = ROOT / "tests" / "data" / "format2"
HOSTILE = "hostile"  # directory of the hostile files
PHRASES = ["the king", "a horse", "what light", "to be", "or not"]

OWN_CODE = """from dataclasses import dataclass
from torch import nn
from torch.nn import functional as F
from mingpt_ddp.registry import DataConfig, ModelConfig, register

@dataclass(frozen=True)
class Table(ModelConfig):
    width: int = 1

@register("model", "table", Table)
class Model(nn.Module):
    def __init__(self, config, vocab_size, block_size):
        super().__init__()
        self.scores = nn.Embedding(vocab_size, vocab_size)
    def forward(self, tokens, targets=None):
        logits = self.scores(tokens)
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())

@register("data", "lines", DataConfig)
def lines(config):
    yield from open(config.path)
"""  # noqa: E501


def text(seed: int, pieces: int = 150) -> bytes:
    generator = random.Random(seed)
    return "".join(
        generator.choice(PHRASES) + generator.choice(".\n,; ") for _ in range(pieces)
    ).encode()


def zipped(members: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def tarred(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.GNU_FORMAT) as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def tar_member(name: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def sparse_tar(offset: int, size: int) -> bytes:
    """Return a tar file in GNU's old sparse format. Its member has one part and claims any size."""
    whole = bytearray(tarred((tar_member("a.txt"), b"to be\n")))
    whole[156:157] = b"S"
    whole[386:410] = f"{offset:011o}\0{6:011o}\0".encode()
    whole[483:495] = f"{size:011o}\0".encode()
    whole[148:156] = b" " * 8
    whole[148:156] = f"{sum(whole[:512]):06o}\0 ".encode()
    return bytes(whole)


def tensors(header: bytes, data: bytes = b"") -> bytes:
    """Return a safetensors file with this header."""
    return len(header).to_bytes(8, "little") + header + data


SPECIAL = (
    "fifo",
    "directory",
    "dangling",
    "loop",
    "root",
    "zero",
    "null",
    "socket",
    "sparse",
    "fifos",
    "unreadable",
)


def names() -> list[str]:
    """Return the names of all hostile files, and the name of a file that does not exist."""
    return [*contents(), *SPECIAL, "missing"]


@functools.cache
def contents() -> dict[str, bytes]:
    """Return the content of those hostile files that are regular files, by name."""
    aliases = "\n".join(
        [
            "a0: &a0 [x, x]",
            *(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)),
        ]
    )
    merges = "\n".join(
        [
            "a0: &a0 {k: 1}",
            *(f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 10)}]}}" for i in range(1, 12)),
        ]
    )
    shape = b'{"w":{"dtype":"F32","shape":[1000000000,1000000000],"data_offsets":[0,4]}}'
    half_tar = tarred((tar_member("a.txt"), text(3)))
    return {
        "empty": b"",
        "zeros": bytes(5000),
        "noise": random.Random(1).randbytes(3000),
        "latin1.txt": b"caf\xe9 " * 500,
        "utf16.txt": ("\ufeff" + "to be " * 500).encode("utf-16-le"),
        "one_letter.txt": b"a" * 3000,
        "control.txt": b"\x1b]0;x\x07\x9b2J\r\x00" * 300,
        "line.txt": b"ab" * 100_000,
        "png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(200),
        "pickle": pickle.dumps({"w": [1, 2]}),
        "half.gz": gzip.compress(text(1))[:-12],
        "not.gz": b"\x1f\x8b" + text(1),
        "many.zip": zipped({f"{i}.txt": b"" for i in range(2000)}),
        "up.zip": zipped({"../../up.txt": text(1), "/etc/x": text(2), "a\x1b[2J.txt": text(3)}),
        "half.zip": zipped({"a.txt": text(1)})[:-30],
        "half.tar": half_tar[:700],
        "damaged.tar": half_tar[:512] + b"\xff" * 512 + half_tar[1024:],
        "links.tar": tarred(
            (tar_member("a", tarfile.SYMTYPE, "/etc/passwd"), b""),
            (tar_member("b", tarfile.LNKTYPE, "b"), b""),
        ),
        "sparse.tar": sparse_tar(0, 8 << 30),
        "bad_sparse.tar": sparse_tar(1 << 32, 5),
        "deep.json": b"[" * 100_000 + b"]" * 100_000,
        "number.json": b'{"a": ' + b"9" * 100_000 + b"}",
        "list.json": b"[]",
        "null.json": b"null",
        "aliases.yaml": aliases.encode(),
        "merges.yaml": merges.encode(),
        "object.yaml": b"trainer: !!python/object/apply:os.system ['touch ran']\n",
        "deep.yaml": b"[" * 20_000,
        "loop.yaml": b"a: &a [*a]\n",
        "duplicate.yaml": b"trainer: {max_steps: 1}\ntrainer: 3\n",
        "long.safetensors": (2**63).to_bytes(8, "little") + b"{}",
        "large.safetensors": tensors(shape, bytes(4)),
        "deep.safetensors": tensors(b'{"a":' * 10_000 + b"1" + b"}" * 10_000),
        "code.py": b"import os\nos.nowhere()\n",
        "exit.py": b"import sys\nsys.exit(0)\n",
        "recursion.py": b"def f(): f()\nf()\n",
        "null.py": b"a = 1\0\n",
        "deep.py": b"(" * 5000,
        "latin1.py": b"a = '\xe9'\n",
    }


def make_hostile(directory: Path) -> None:
    """Write the hostile files, including every kind of special file that this machine has."""
    directory.mkdir()
    for name, content in contents().items():
        (directory / name).write_bytes(content)
    os.mkfifo(directory / "fifo")
    (directory / "directory").mkdir()
    targets = {
        "dangling": "nowhere",
        "loop": "loop",
        "root": "/",
        "zero": "/dev/zero",
        "null": "/dev/null",
    }
    for name, target in targets.items():
        (directory / name).symlink_to(target)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(directory / "socket"))
    with open(directory / "sparse", "wb") as file:
        file.truncate(1 << 40)
    (directory / "fifos").mkdir()
    os.mkfifo(directory / "fifos" / "a.txt")
    os.mkfifo(directory / "fifos" / "config.yaml")
    if os.getuid() != 0:  # root can read every file
        (directory / "unreadable").write_bytes(text(1))
        (directory / "unreadable").chmod(0)


def make_valid(directory: Path) -> None:
    """Write the files that valid configurations name. The directory must be the current one."""
    from mingpt_ddp.data.tokenizers.bpe import train_bpe
    from mingpt_ddp.snapshots.exports.export_files import export_files

    (directory / "good.txt").write_bytes(text(1))
    (directory / "good.gz").write_bytes(gzip.compress(text(1)))
    (directory / "good.zip").write_bytes(zipped({"a.txt": text(1), "b/c.txt": text(2)}))
    (directory / "good.tar").write_bytes(
        tarred((tar_member("a.txt"), text(1)), (tar_member("b.txt"), text(2)))
    )
    (directory / "texts" / "more").mkdir(parents=True)
    (directory / "texts" / "a.txt").write_bytes(text(1))
    (directory / "texts" / "more" / "b.txt").write_bytes(text(2))
    (directory / "tokenizer.json").write_text(train_bpe(iter([text(1).decode()]), 270).json)
    shutil.copytree(FORMAT2 / "gpt-adamw" / "run", directory / "run")
    shutil.copytree(FORMAT2 / "modern-muon" / "run", directory / "modern")
    shutil.copy(FORMAT2 / "gpt-adamw" / "text.txt", directory)
    for name, form in (("export", "safetensors"), ("hf", "hf")):
        (directory / name).mkdir()
        for file, content in export_files("run", "newest", form, name)[1].items():
            (directory / name / file).write_bytes(bytes(content))
    (directory / "pickled").mkdir()
    (directory / "pickled" / "model.pt").write_bytes(pickle.dumps({"weight": 1}))
    (directory / "own" / "model").mkdir(parents=True)
    (directory / "own" / "mine.py").write_text(OWN_CODE)
    (directory / "own" / "model" / "table.yaml").write_text(
        "name: own\narchitecture: table\ncode: mine.py\n"
    )
    (directory / "presets" / "experiment").mkdir(parents=True)
    preset = (
        "# @package _global_\ndefaults: [{override /optimizer: sgd}]\ntrainer: {max_steps: 3}\n"
    )
    (directory / "presets" / "experiment" / "mine.yaml").write_text(preset)


def clone(source: Path, target: Path) -> None:
    """Copy a file of any kind or a tree of files. Links are copied as links."""
    mode = source.lstat().st_mode
    if stat.S_ISDIR(mode):
        target.mkdir()
        for entry in source.iterdir():
            clone(entry, target / entry.name)
    elif stat.S_ISLNK(mode):
        target.symlink_to(os.readlink(source))
    elif stat.S_ISREG(mode) and source.lstat().st_blocks * 512 >= source.lstat().st_size:
        shutil.copy(source, target)
    elif stat.S_ISREG(mode):  # a sparse file is copied as one hole
        target.touch()
        os.truncate(target, source.lstat().st_size)
    elif stat.S_ISFIFO(mode):
        os.mkfifo(target)
    else:
        os.mknod(target, mode)


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def edit(path: Path, at: float, value: object) -> None:
    """Replace one value in a JSON or YAML file, or one byte of another file.

    Args:
        path: The file.
        at: Position of the value or byte, as a share of their number, from 0 to 1.
        value: A plain value, or "delete".
    """
    try:
        values = (
            json.loads(path.read_text())
            if path.suffix == ".json"
            else yaml.safe_load(path.read_text())
        )
        places = [*leaves(values)]
        holder, key = places[int(at * len(places))]
    except (ValueError, yaml.YAMLError, IndexError):
        content = bytearray(path.read_bytes())
        content[int(at * len(content))] ^= 0xFF
        path.write_bytes(content)
        return
    if value == "delete":
        del holder[key]
    else:
        holder[key] = value
    text = (
        json.dumps(values) if path.suffix == ".json" else yaml.safe_dump(values, allow_unicode=True)
    )
    path.write_bytes(text.encode("utf-8", "surrogatepass"))


def leaves(values: object):
    """Yield every value in a tree of lists and mappings, as the container and the key in it."""
    pairs = (
        values.items()
        if isinstance(values, dict)
        else enumerate(values)
        if isinstance(values, list)
        else ()
    )
    for key, value in [*pairs]:
        yield values, key
        if isinstance(value, (dict, list)):
            yield from leaves(value)
