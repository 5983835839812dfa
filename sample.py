"""Generate text. For example: python sample.py snapshot=outputs/demo prompt="The " """

from mingpt_ddp.sample import main

if __name__ == "__main__":
    main()
