"""Write and commit snapshots on a thread of every rank, and delete old snapshots."""
