"""The ranks of an attempt: how they find each other, exchange values, and notice a failure."""
