"""Write a snapshot on a thread of every rank, and delete old ones; store.py commits it."""
