"""Prepare the command line of `train` or `plan` for Hydra."""

import logging
import os
import re
import sys

from mingpt_ddp.config.compose import hydra_utils
from mingpt_ddp.config.validation import refuse_credentials
from mingpt_ddp.process import logs
from mingpt_ddp.process.env import DistEnv
from mingpt_ddp.process.terminal import escape_what_streams_cannot_encode


def prepare_command_line(env: DistEnv) -> None:
    """Put the command line into a form that Hydra accepts, and set up logging and streams.

    Raises:
        ConfigError: The command line contains a password, which Hydra would save, or a word that
            Hydra cannot read.
    """
    # torch.distributed.launch sets LOCAL_RANK, and also passes --local-rank, which Hydra rejects.
    words = [word for word in sys.argv[1:] if not re.match(r"--local[-_]rank\b", word)]
    sys.argv[1:] = hydra_utils.reorder_argv(words)
    escape_what_streams_cannot_encode()
    logging.raiseExceptions = False  # print no traceback when a log record cannot be written
    os.environ["HYDRA_FULL_ERROR"] = "1"  # Hydra raises its errors instead of printing them
    logs.to_console(env)
    for word in sys.argv[1:]:
        refuse_credentials(word.partition("=")[0], word)
    hydra_utils.check_options(words)
