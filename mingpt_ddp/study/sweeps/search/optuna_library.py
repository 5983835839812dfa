"""Import Optuna without its log lines and warnings."""

import contextlib
import logging
import warnings
from collections.abc import Iterator

from mingpt_ddp.errors import ConfigError

try:
    import optuna
    from optuna.storages import journal  # noqa: F401
except ImportError as import_error:
    raise ConfigError(
        "a search needs Optuna; run pip install 'mingpt_ddp[sweep]'"
    ) from import_error

MIN_VERSION = (4, 7)

for library in ("optuna", "alembic"):  # both log a line for each trial
    logging.getLogger(library).setLevel(logging.ERROR)
if tuple(map(int, optuna.__version__.split(".")[:2])) < MIN_VERSION:
    raise ConfigError(
        f"a search needs Optuna 4.7 or later, but {optuna.__version__} is installed; "
        "run pip install 'mingpt_ddp[sweep]'"
    )


@contextlib.contextmanager
def no_warnings() -> Iterator[None]:
    """Hide Python's warnings in this context, because Optuna warns of experimental arguments."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
