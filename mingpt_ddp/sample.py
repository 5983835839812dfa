"""`python -m mingpt_ddp.sample`: generate text from a snapshot."""

from mingpt_ddp.cli.commands.sample import main

if __name__ == "__main__":
    main()
