"""`python -m mingpt_ddp.again`: train a recorded run again, with changes."""

from mingpt_ddp.cli.again_command import main

if __name__ == "__main__":
    main()
