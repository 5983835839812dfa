"""The hostile values, and the directory trees into which a hostile file may be put."""

from __future__ import annotations

from typing import Any

NESTED = (
    "${run.seed}",
    "${nowhere}",
    "${oc.env:NOWHERE}",
    "${oc.env:HOME}",
    "${${run.name}}",
    "${a:${b:1}}",
    "${",
)
NUMBERS = (
    "2147483648",
    "9223372036854775808",
    "-9223372036854775809",
    "1e308",
    "1" + "0" * 400,
    "5e-324",
    "1e-300",
    "0",
    "-1",
    "-0.0",
    "nan",
    "inf",
    "-inf",
    "1",
    "2",
    "3",
    "0.5",
    "1e3",
    "65536",
    "1000000",
    "1e-9",
    "0x10",
    "1_0",
)
OTHERS = (
    "[1,2]",
    "{a:1}",
    "true",
    "null",
    "''",
    "[]",
    "{}",
    "[[]]",
    "[1",
    "{",
    "a,b",
    "x=y",
    "auto",
    "[nan,-1]",
)
WORDS = (
    "ä€😀",
    "\x1b[2J\x07",
    "a\nb",
    "\udcff",
    "\u202e",
    "..",
    "/",
    "~",
    "-",
    " ",
    "%s{0}",
    "\\",
    "a" * 100_000,
    "\ud800",
    "$(touch ran)",
    "'",
    "\x9b",
    "ﬀ" * 200,
    "." * 300,
    "[" * 2000,
    "${" * 300,
    "a/" * 3000,
    "a" * 256,
)
# blockcache and simplecache are left out, since fsspec leaves their directories in TMPDIR.
URLS = """
foo://bar http://127.0.0.1:9/x https://[ http://127.0.0.1:99999/x :// file:// file:/// data:,a memory://x memory://
zip://a.txt::good.zip zip://**::good.zip zip://**::hostile/up.zip zip://**::hostile/half.zip tar://**::hostile/links.tar tar://**::hostile/bad_sparse.tar tar://a::b a::b :: reference://x dir://x ftp://127.0.0.1:9/x
sftp://127.0.0.1:9/x github://a:b@/x local://good.txt filecache://x gs://b/x hf://b/x s3://
s3://bucket/x http://user:secret@127.0.0.1:9/ git://x jupyter://x libarchive://x smb://127.0.0.1:9/x dask://x root://
webhdfs://127.0.0.1:9/x
""".split()  # noqa: E501, SIM905
JSON_VALUES: tuple[Any, ...] = (
    2**31,
    2**63,
    10**400,
    -1,
    0,
    1,
    3,
    1e308,
    5e-324,
    float("nan"),
    float("inf"),
    "",
    "x",
    "ä\ud800",
    "a" * 100_000,
    None,
    True,
    [],
    {},
    [[]],
    {"a": 1},
    [1, 2],
    "nan",
    "../x",
    "/dev/zero",
    "delete",
    "delete",
    "\x1b[2J",
    [0] * 9999,
)
STEP = "snapshots/step_00000004"
RUN_FILES = [".lock", "config.yaml", "result.json", "metrics.jsonl", "snapshots", STEP]
RUN_FILES += [
    f"{STEP}/{name}"
    for name in ("manifest.json", "state.json", "model.safetensors", "optimizer.safetensors")
]
RUNS = [("run", RUN_FILES), ("modern", RUN_FILES)]
EXPORTS = [
    ("export", ["config.json", "model.safetensors"]),
    ("hf", ["config.json", "model.safetensors", "tokenizer.json"]),
    ("pickled", ["model.pt"]),
]
PACKED = [(name, [""]) for name in ("good.txt", "good.gz", "good.zip", "good.tar")]
TEXTS = [*PACKED, ("texts", ["a.txt", "more/b.txt", "more"])]
# For each key that takes a path: the valid trees into which a hostile file may be put, each with
# the files that a command reads. A key of train is named by its last part if that is unambiguous.
TREES = {
    "init_from": RUNS + EXPORTS,
    "tokenizer": [("tokenizer.json", [""]), ("hf/tokenizer.json", [""])],
    "resume": RUNS,
    "data.path": TEXTS,
    "sources": TEXTS,
    "val_paths": TEXTS,
    "split_paths": TEXTS,
    "snapshot": RUNS,
    "url": RUNS,
    "runs": RUNS,
    "run": RUNS,
    "data_path": TEXTS,
    "code": [("own/mine.py", [""])],
}
PATHS = (
    "run.init_from",
    "run.resume",
    "run.root",
    "snapshot.path",
    "data.path",
    "data.cache_dir",
    "data.sources",
    "data.val_paths",
    "data.split_paths",
    "data.tokenizer",
    "model.code",
    "data.code",
    "optimizer.code",
    "tracker.uri",
)
