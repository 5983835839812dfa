"""Snapshots: what is saved, how it is written beside training, how it is found again.

`tensors` and `image` turn live objects into files, `format` says what a snapshot consists of, `store` keeps and `find`
finds them, `background` and `saver` do that for a run, `position` says how far that is, `lease` whose a place in an
object store is.
`python -m mingpt_ddp.snapshots` looks after them by hand: `survey` and `manage`.
"""
