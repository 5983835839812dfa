"""When a run saves a snapshot."""
