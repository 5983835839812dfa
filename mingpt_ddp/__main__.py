"""Run `python -m mingpt_ddp COMMAND`. Without a command, train as main.py does."""

from mingpt_ddp.cli.main import main

main(trains_by_default=True)
