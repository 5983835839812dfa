"""Small tensors are fastest on one thread, and a torch that is already loaded does not look at this again."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
