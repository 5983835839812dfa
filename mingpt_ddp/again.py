"""`python -m mingpt_ddp.again`: train a recorded run again, with changes."""

from mingpt_ddp.cli.commands.again import main

if __name__ == "__main__":
    main()
