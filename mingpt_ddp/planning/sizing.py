"""What a GPT or a Modern takes on a GPU in a training step besides its state, by formulas.

Symbols: B sequences of a micro-batch, T tokens of a context, C = n_embd, H = n_head, L = n_layer,
V outputs; E = B T C, the elements of the residual stream between two blocks; s bytes of an element
in products (2, or 4 in fp32) and r in the residual stream; P ranks that divide the matrices
(ddp.tensor_parallel); d = 1 with dropout, else 0. Sizes are in bytes.
"""

from collections.abc import Callable
from dataclasses import dataclass

from mingpt_ddp.config.keys.model_config import TransformerConfig, changed_parts
from mingpt_ddp.models.gpt import GPT
from mingpt_ddp.models.modern import Modern
from mingpt_ddp.planning.state_shapes import State
from mingpt_ddp.tasks.language_model import LanguageModel

FP32 = 4
# When a step may need most: in the forward pass of the loss, in its backward pass, in those of the
# last and of the first block, at the end of the backward pass; when a strategy sends a message of
# its own after the passes; in the optimizer's update.
MOMENTS = ("forward", "loss", "last", "first", "end", "message", "update")


@dataclass(frozen=True)
class Kept:
    """What differs between the architectures."""

    before: int  # kept before the first block
    block: int  # kept by a block, besides copies of its weights
    inputs: int  # kept by all blocks together, if they are computed again
    shared: int  # of what a block keeps, in `inputs` already
    backward: int  # gradients in a block at the same time, less what it has freed
    converted: int  # output of the last norm, of which the head keeps a copy in another type
    ends: int  # gradients at the end of the backward pass that no parameter holds yet


@dataclass(frozen=True)
class Activations:
    """What the passes of a model keep and allocate, by the formula of its architecture."""

    formula: Callable[["Activations", int], Kept]
    model: TransformerConfig
    length: int  # T
    outputs: int  # V
    itemsize: int  # s
    matrices: int  # elements of those of a block, of this rank
    parts: int  # P
    recomputes: bool  # trainer.activation_checkpointing
    gathers: bool  # fsdp: the weights are in the type of the products, and nothing copies them

    def stream(self, rows: int) -> int:
        """Return E."""
        return rows * self.length * self.model.n_embd

    def copies(self, elements: int) -> int:
        """Return autocast's copies of weights: s for each element; none in fp32."""
        return self.itemsize * elements * (self.itemsize < FP32 and not self.gathers)

    def at(self, moment: str, rows: int) -> tuple[int, int]:
        """Return the activations and the temporaries with micro-batches of B = `rows`.

        Activations are those before the first block and of L blocks, or of the first alone, with
        copies of their weights (or inputs, if blocks are computed again). Those of the loss are
        (4 + s) E + 8 B T + 4 B T V + s V C: the last norm's input in fp32, its output, two numbers
        a token; the logarithms of the probabilities; a copy of the head's weights. Temporaries:

        forward: the logits in fp32, 4 B T V, and as products and the last norm return them; the
            copies of all weights, where blocks do not keep theirs.
        loss: the gradients of the logarithms and of the logits, 8 B T V.
        last, first: the gradients in a block; its activations, if they are computed again.
        end: gradients that no parameter holds yet.
        """
        layers = self.model.n_layer
        kept = self.formula(self, rows)
        copies = self.copies(self.matrices)
        block = kept.block + copies
        if moment in ("message", "update"):
            return 0, 0
        if moment == "end":
            return kept.before, kept.ends
        blocks = 1 if moment == "first" else layers
        inputs_of_block = kept.inputs // layers if self.recomputes else block
        live = kept.before + blocks * inputs_of_block
        if moment in ("last", "first"):
            again = (block - kept.shared) * self.recomputes
            return live, kept.backward + again
        tokens = rows * self.length
        logits = tokens * self.outputs
        live += (FP32 + self.itemsize) * self.stream(rows) + 8 * tokens + FP32 * logits
        live += self.copies(self.outputs * self.model.n_embd)
        if moment == "loss":
            return live, 2 * FP32 * logits
        converted = self.itemsize * logits + kept.converted
        cached = layers * copies * self.recomputes
        return live, FP32 * logits + converted * (self.itemsize < FP32) + cached

    def operations(self, rows: int) -> int:
        """Return the operations of products in a forward and backward pass.

        For each token 6 per element of a matrix and of the head, and 6 L C T / P of attention: half
        of its products, as kernels skip what is above the diagonal. Blocks that are computed again
        repeat a third of that, without their last product, a third of the elements.
        """
        matrices = self.model.n_layer * self.matrices
        attention = self.model.n_layer * self.model.n_embd * self.length // self.parts
        per_token = 6 * (matrices + attention + self.outputs * self.model.n_embd)
        per_token += 2 * (matrices - matrices // 3 + attention) * self.recomputes
        return rows * self.length * per_token


def gpt(a: Activations, rows: int) -> Kept:
    """Return the sizes of models/gpt.py; r = 4, but s if the weights are gathered.

    before: d E + 16 B T. A mask; the tokens and their targets.
    block: (8 + 2 s + 12 s / P + 2 d) E + 16 B T + 4 B T H / P. The inputs of both norms in fp32;
        those of qkv and up; q, k, v, what proj gets, and the hidden features before and after GELU;
        two masks; two numbers a token for each norm; for attention one a head and token.
    inputs: r L E. shared: 4 E if r = 4, the input of a block's first norm.
    backward: (r + 4 s / P) E, and s E with dropout or if r > s. The gradients of the block's
        output, of its hidden features, of what is added to the stream.
    converted: 4 E. ends: 2 r E + 8 V C. Gradients of a block's input and output, and of the
        embedding by its two uses.
    """
    s, parts = a.itemsize, a.parts
    r = s if a.gathers else FP32
    stream, tokens = a.stream(rows), rows * a.length
    drops = a.model.dropout > 0
    divided = (12 * s * stream + 4 * tokens * a.model.n_head) // parts
    embedding = a.outputs * a.model.n_embd
    return Kept(
        before=drops * stream + 16 * tokens,
        block=(8 + 2 * s + 2 * drops) * stream + 16 * tokens + divided,
        inputs=r * a.model.n_layer * stream,
        shared=FP32 * stream * (r == FP32),
        backward=(r + s * (drops or r > s)) * stream + 4 * s * stream // parts,
        converted=FP32 * stream,
        ends=2 * r * stream + 2 * FP32 * embedding * (not a.gathers),
    )


def modern(a: Activations, rows: int) -> Kept:
    """Return the sizes of models/modern.py; r = s.

    before: (4 + 2 s) E + 24 B T, and 3 s E. The first norm's input in fp32, what its smear adds and
        returns; two numbers a token; the tokens and their targets; qkv of the first block, whose
        values all use (in fp32 it keeps that anyway).
    block: (16 + 16 s + 2 d) E + 16 B T + 20 B T H; in fp32 4 E more. The inputs of both norms in
        fp32, and of that of q and k (in fp32 all of qkv); what both smears add and return (4 s),
        rotated q and k (2 s), mixed values, what proj gets, and the hidden features before and
        after the square (8 s); two masks; two numbers a token for each norm, five a head and token.
    inputs: s (L - 1) E: the first one is kept before.
    backward: 9 s E; 11 s E if blocks are computed again. The gradients of the output and of the
        hidden features (4 s), twice more for the factors of the square, which is freed; those of
        the first block's input and values, which add up over blocks.
    ends: 2 s E. Gradients of a block's input and output.
    """
    s = a.itemsize
    stream, tokens = a.stream(rows), rows * a.length
    drops = a.model.dropout > 0
    is_fp32 = s == FP32
    values = 3 * s * (a.recomputes or not is_fp32)
    elements = 4 * FP32 + 16 * s + 2 * drops + FP32 * is_fp32
    return Kept(
        before=(FP32 + 2 * s + values) * stream + 24 * tokens,
        block=elements * stream + 16 * tokens + 20 * tokens * a.model.n_head,
        inputs=s * (a.model.n_layer - 1) * stream,
        shared=0,
        backward=(9 + 2 * a.recomputes) * s * stream,
        converted=0,
        ends=2 * s * stream,
    )


FORMULAS: dict[type, Callable[[Activations, int], Kept]] = {GPT: gpt, Modern: modern}


def activations_of(state: State, gathers: bool) -> Activations | None:
    """Return the formulas of a model; None of a user's own model, part of one, or task.

    Args:
        gathers: the strategy gathers divided weights.
    """
    config = state.task.config
    model = config.model
    formula = FORMULAS.get(type(state.model))
    if formula is None or type(state.task) is not LanguageModel or changed_parts(vars(model)):
        return None
    assert isinstance(model, TransformerConfig)
    block = state.model.get_submodule("blocks.0")
    matrices = sum(p.numel() for p in block.parameters() if p.dim() > 1)
    outputs, length = state.task.shape
    return Activations(
        formula,
        model,
        length,
        outputs,
        itemsize=state.dtype.itemsize,
        matrices=matrices,
        parts=state.parts,
        recomputes=config.trainer.activation_checkpointing,
        gathers=gathers,
    )
