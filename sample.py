"""Generate text. For example: python sample.py outputs/demo prompt=The"""

import sys

try:
    from mingpt_ddp.cli.commands.sample import main
except ModuleNotFoundError as error:
    sys.exit(
        f"error: the package {error.name} is not installed here; run `make train` once, then `. "
        ".venv/bin/activate`"
    )

if __name__ == "__main__":
    main()
