"""Train. For example: torchrun --nproc_per_node=4 main.py trainer.max_epochs=50"""

from mingpt_ddp.cli.commands.train import main

if __name__ == "__main__":
    main()
