"""`python -m mingpt_ddp.collectives`: check and time the collectives of a cluster."""

from mingpt_ddp.cli.collectives_command import main

if __name__ == "__main__":
    main()
