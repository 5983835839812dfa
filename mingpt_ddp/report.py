"""`python -m mingpt_ddp.report`: the table and the page of a sweep."""

from mingpt_ddp.cli.commands.report import main

if __name__ == "__main__":
    main()
