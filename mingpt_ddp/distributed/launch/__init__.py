"""Local workers: their launcher, what they start from, and the channels back to it."""
