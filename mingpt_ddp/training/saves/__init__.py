"""Save snapshots of a run on a schedule, and resume the run from one of them."""
