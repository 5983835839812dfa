"""Helpers that write files and archives of texts, encode them, and decode their tokens."""

from __future__ import annotations

import io
import logging
import tarfile
import zipfile
from pathlib import Path

import numpy as np

from mingpt_ddp.config.keys.components import DataConfig
from mingpt_ddp.data.dataset import EncodedText
from mingpt_ddp.data.prepare import prepare_all
from mingpt_ddp.data.text.text_cache import TextCache
from mingpt_ddp.data.tokenizers.tokenizer import tokenizer_from_state


def prepare(config: DataConfig, cache: TextCache | None = None) -> EncodedText:
    """Encode a text, and log the notes that a run logs when it starts."""
    encoded = prepare_all(config, cache=cache)[""]
    for line in encoded.notes:
        logging.getLogger("mingpt_ddp").info("%s", line)
    return encoded


def tokens_of(encoded: EncodedText) -> list[int]:
    return np.fromfile(Path(encoded.directory) / "tokens.bin", encoded.dtype).tolist()


def decoded(encoded: EncodedText) -> str:
    return tokenizer_from_state(encoded.tokenizer).decode(tokens_of(encoded))


def text_of(config: DataConfig) -> str:
    return decoded(prepare(config))


def make_directory(path: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(content)
    return path


def make_zip(path: Path, files: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return path


def make_tar(path: Path, files: dict[str, bytes], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path
