"""`python -m mingpt_ddp.plan`: what a configuration means, without training it."""

from mingpt_ddp.cli.commands.plan import main

if __name__ == "__main__":
    main()
