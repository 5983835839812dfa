"""`python -m mingpt_ddp COMMAND`, and without a command what main.py does."""

from mingpt_ddp.cli.main import main

main(trains_by_default=True)
