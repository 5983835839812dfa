"""Train with the code in a directory. Usage: `python version_job.py DIRECTORY [ARGUMENTS]`.

The command `versions` starts this file as a script. It imports nothing from the current directory,
and nothing from the package that contains it, which may be another version.
"""

import importlib.util
import os
import runpy
import sys

# Packages that must be imported from the directory, and their paths in a checkout.
PACKAGES = {"mingpt_ddp": "mingpt_ddp", "mingpt_ddp.conf": "conf", "hydra_plugins": "hydra_plugins"}


def main() -> None:
    """Run `python -m mingpt_ddp` with the packages in the directory.

    Refuse to run if Python would import one of them from elsewhere.
    """
    directory = sys.argv.pop(1)
    here = os.path.dirname(os.path.realpath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.realpath(path) not in (here, os.getcwd())]
    sys.path.insert(0, directory)
    for name, folder in PACKAGES.items():
        expected = os.path.realpath(os.path.join(directory, folder))
        spec = importlib.util.find_spec(name) if os.path.isdir(expected) else None
        imported = next(iter(spec.submodule_search_locations or [""])) if spec else expected
        if os.path.realpath(imported) != expected:
            text = f"run error: {name} is imported from {imported}, not from {expected}"
            print(text, file=sys.stderr)
            sys.exit(2)
    runpy.run_module("mingpt_ddp", run_name="__main__")


if __name__ == "__main__":
    main()
