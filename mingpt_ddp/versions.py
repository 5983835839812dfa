"""`python -m mingpt_ddp.versions`: which of several versions of the code is better, or faster."""

from mingpt_ddp.cli.commands.versions import main

if __name__ == "__main__":
    main()
