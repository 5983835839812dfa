"""`python -m mingpt_ddp.evaluate`: measure the model of a snapshot."""

from mingpt_ddp.cli.commands.evaluate import main

if __name__ == "__main__":
    main()
