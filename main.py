"""Train. For example: torchrun --nproc_per_node=4 main.py trainer.max_epochs=50"""

import sys

try:
    from mingpt_ddp.cli.train_command import main
except ModuleNotFoundError as error:
    sys.exit(
        f"error: {error.name} is not installed here; type `make train` once, then `. "
        ".venv/bin/activate`"
    )
except KeyboardInterrupt:
    sys.exit(130)

if __name__ == "__main__":
    main()
