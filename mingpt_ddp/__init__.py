"""Train a small GPT seriously: Hydra configuration, DDP, snapshots that survive kill -9."""

__version__ = "0.1.0"
