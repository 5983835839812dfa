"""Print the lowest versions that setup.cfg allows, as constraints for pip: NAME==VERSION.

Usage: python scripts/lowest_versions.py EXTRA... >FILE; pip install -c FILE '.[EXTRA,...]'
`make lowest` runs both commands. A requirement without a lower bound is left out. torch is left out
too. The Makefile sets its version, because older builds in the index may take gigabytes.
"""

import configparser
import re
import sys


def lowest(requirements: str) -> list[str]:
    """Turn the lines of a requirements field of setup.cfg into pins.

    An environment marker is kept.
    """
    pins = []
    form = r"(?P<name>[\w.-]+)(\[.*?\])?>=(?P<version>[\w.]+)[^;]*(?P<marker>;.*)?"
    for line in requirements.split("\n"):
        found = re.match(form, line.strip())
        if found and found["name"] != "torch":
            pins.append(f"{found['name']}=={found['version']}{found['marker'] or ''}")
    return pins


if __name__ == "__main__":
    setup = configparser.ConfigParser()
    setup.read("setup.cfg")
    extras = setup["options.extras_require"]
    pins = {*lowest(setup["options"]["install_requires"])}
    for extra in sys.argv[1:]:
        pins.update(lowest(extras[extra]))
    print(*sorted(pins), sep="\n")
