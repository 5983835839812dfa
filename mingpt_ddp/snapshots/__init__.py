"""Snapshots: the state of a run on disk.

A run saves and loads through `manager`. `state_dict` turns models and optimizers into named tensors
and back. `format`, `staging_buffer` and `tensor_index` define the files, and `hashes` computes
hashes of tensors. `store_reader` reads and verifies snapshots.

write/ has the store that commits and deletes snapshots, the asynchronous save, the share of each
rank, the ledger and retention. read/ finds snapshots by URL and loads parts of them. exports/
writes a model for other programs. transformers_format/ converts models and tokenizers to files of
transformers and back, for exports and for `run.init_from`.
"""
