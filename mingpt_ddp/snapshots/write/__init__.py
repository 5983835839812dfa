"""Write, commit and delete snapshots."""
