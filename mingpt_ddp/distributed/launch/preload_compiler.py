"""Import torch's compiler in the fork server if there is a GPU, where models are compiled.

This takes half a second, which a run that compiles nothing should not spend (fork_server.py).
"""

import torch

from mingpt_ddp.torch_internals import import_compiler

if torch.cuda.is_available():
    import_compiler()
