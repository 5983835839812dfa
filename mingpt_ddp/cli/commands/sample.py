"""Generate text from a snapshot.

    python -m mingpt_ddp sample outputs/demo prompt="The " max_new_tokens=500 temperature=0.8 top_k=40 seed=1

snapshot        path or fsspec URL of a run directory, of its directory of snapshots, or of one snapshot
step            newest (the default), best (lowest validation loss) or the number of a step
prompt          start of the text; - reads it from standard input
max_new_tokens  number of tokens to generate (500)
temperature     divides the logits: a value below 1 makes the text more predictable, 0 always takes the likeliest token (0.8)
top_k           sample from the k likeliest tokens (all)
top_p           sample from the likeliest tokens whose probabilities add up to p (all)
seed            seed of the random numbers; another seed gives another text (1)
samples         number of texts to generate (1)
device          auto (the default, uses the GPU if there is one), cpu or cuda
precision       auto (the default, 16 bits where the hardware is fast at it), fp32, bf16 or fp16; on another device or in
                another precision the same seed may give another text
code            your Python file that registers the model, if the model is not built in
"""  # noqa: E501

import sys
from pathlib import Path

from mingpt_ddp.cli.arguments import run_command
from mingpt_ddp.cli.sample_config import SampleConfig
from mingpt_ddp.errors import DataError, SnapshotError
from mingpt_ddp.process.terminal import echo


def main() -> None:
    """Run sample.py and `python -m mingpt_ddp sample`."""
    run_command(__doc__, _command)


def _command(config: SampleConfig) -> int:
    try:
        prompt = sys.stdin.read() if config.prompt == "-" else config.prompt
    except (UnicodeDecodeError, AttributeError) as error:  # sys.stdin is None if it is closed
        reason = error if sys.stdin else "it is closed"
        raise DataError(f"prompt=- needs UTF-8 text on standard input: {reason}") from error
    for number, text in enumerate(sample(config, prompt)):
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        echo(f"{'-' * 80}\n{text}" if number else text, verbatim=not is_terminal)
    return 0


def sample(config: SampleConfig, prompt: str) -> list[str]:
    """Generate texts, and return each with the prompt before it.

    Raises:
        SnapshotError: There is no snapshot, or no model can be built from it.
        DataError: The prompt has characters that the model does not know.
    """
    # torch takes a second to import, so import it only after the keys are validated.
    from mingpt_ddp.config.builders import attribute_errors_to_user_code, run_file
    from mingpt_ddp.inference.decoding import decoding_precision, prepare
    from mingpt_ddp.inference.generate import SamplingParams, generate_text
    from mingpt_ddp.models import move_model
    from mingpt_ddp.models.ops import resolve_device
    from mingpt_ddp.snapshots.read.load_model import load_model

    if config.code is not None:
        run_file(Path(config.code), "code")
    device = resolve_device(config.device, "device")
    model, tokenizer = load_model(config.snapshot, config.step)
    sampling = SamplingParams(config.temperature, config.top_k, config.top_p)
    try:
        with attribute_errors_to_user_code():
            move_model(model, device)
            precision = decoding_precision(config.precision, model, config.samples)
            prepare(model, precision, config.samples)
            texts = generate_text(
                model,
                tokenizer,
                prompt,
                config.max_new_tokens,
                sampling,
                config.seed,
                config.samples,
            )
    except RuntimeError as error:  # weights that are not finite, or too little memory
        raise SnapshotError(f"the model of {config.snapshot} cannot be used: {error}") from error
    return [prompt + text for text in texts]
