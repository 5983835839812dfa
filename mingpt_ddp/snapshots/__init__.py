"""Snapshots: the state of a run on disk.

A run saves and loads through `manager`. `state_dict` turns models and optimizers into named tensors
and back. `format`, `staging_buffer` and `tensor_index` define the files, and `hashes` computes
hashes of tensors. `store_reader` reads and verifies snapshots.

write/ has the store that commits and deletes snapshots, the asynchronous save, the plan of which
rank writes which tensors, the ledger of hashes, and retention. read/ finds snapshots by URL and
loads all or some of their tensors. exports/ writes a model for other programs. transformers_format/
converts models and tokenizers to the files of the transformers library and back, for exports and
for `run.init_from`.
"""
