"""Snapshots: the state of a run on disk. Capture, asynchronous save, lookup and restore.

`state_dict` turns live objects into named tensors and back, `format` and `staging_buffer` define
the files, `store` writes, commits and deletes them, `store_reader` reads and verifies them, `load`
finds them by URL, `load_model` builds the model alone. A run saves through `manager` and
`async_writer`. `python -m mingpt_ddp.snapshots` is cli/commands/snapshots.py.
"""
