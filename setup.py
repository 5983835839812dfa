"""Build the package as setup.cfg says, with a README whose links work outside of a checkout, on a
package index.
"""

import re
import shutil
from configparser import ConfigParser
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
RELATIVE = re.compile(r"(?P<image>!?)(?P<text>\[[^]]*\])\((?P<path>(?![a-z]+:|#)[^)\s]+)\)")


def absolute_links(markdown: str, url: str) -> str:
    """Let links and pictures that name files of the checkout name the same files at `url`, a
    repository on GitHub.
    """

    def absolute(link: re.Match[str]) -> str:
        kind = "raw" if link["image"] else "blob"
        return f"{link['image']}{link['text']}({url}/{kind}/main/{link['path']})"

    return RELATIVE.sub(absolute, markdown)


# Delete the files of an earlier build: a module that was deleted since then would be installed.
shutil.rmtree(ROOT / "build" / "lib", ignore_errors=True)
config = ConfigParser()
config.read(ROOT / "setup.cfg")
readme = (ROOT / "README.md").read_text(encoding="utf-8")
setup(long_description=absolute_links(readme, config["metadata"]["url"]))
