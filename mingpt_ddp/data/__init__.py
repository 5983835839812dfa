"""Turn texts into tokens and tokens into batches, and draw random numbers by key."""
