"""Generate text from a snapshot.

    python -m mingpt_ddp sample outputs/demo prompt="The " max_new_tokens=500 temperature=0.8 top_k=40 seed=1

snapshot        a run directory, its snapshots or one of them; a path or any fsspec URL
step            newest (the default), best (lowest validation loss) or a number
prompt          what the text starts with; - reads it from standard input
max_new_tokens  how many characters to generate (500)
temperature     divides the logits: below 1 is more predictable, 0 is greedy (0.8)
top_k, top_p    sample from the k likeliest characters; from the likeliest that sum to probability p (all)
seed, samples   another seed gives another text (1); how many texts to generate (1)
device          auto (the default: the GPU if there is one), cpu or cuda
precision       auto (the default: 16 bits where the hardware is fast at it), fp32, bf16 or fp16; on another device or
                in another precision the same seed may give another text
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
    except (UnicodeDecodeError, AttributeError) as error:  # it is None if it is closed
        reason = error if sys.stdin else "closed"
        raise DataError(f"prompt=- needs UTF-8 text on standard input: {reason}") from error
    for number, text in enumerate(sample(config, prompt)):
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
        echo(f"{'-' * 80}\n{text}" if number else text, verbatim=not is_terminal)
    return 0


def sample(config: SampleConfig, prompt: str) -> list[str]:
    """Return the prompt with each of its continuations.

    Raises:
        SnapshotError: there is no snapshot, or no model can be built from it.
        DataError: the prompt has characters that the model does not know.
    """
    # torch takes a second to import: only after the keys are validated.
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
    except RuntimeError as error:  # non-finite weights, or a context too long for the memory
        raise SnapshotError(f"the model of {config.snapshot} cannot be used: {error}") from error
    return [prompt + text for text in texts]
