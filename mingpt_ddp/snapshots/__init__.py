"""Snapshots: the state of a run on disk. Capture, asynchronous save, lookup and restore.

`state_dict` turns live objects into named tensors and back; `format`, `staging_buffer` and
`tensor_index` define the files; `hashes` are those of tensors. `store` writes, commits and deletes
snapshots, `store_reader` reads and verifies them. A run saves and loads through `manager`: which
rank writes what, the asynchronous save, the ledger and retention are in write/, finding snapshots
by URL and loading parts of them in read/. exports/ writes a model for other programs;
transformers_format/ has the form of transformers, for exports and for `run.init_from`.
`python -m mingpt_ddp snapshots` is cli/commands/snapshots.py.
"""
