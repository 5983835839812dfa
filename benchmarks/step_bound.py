"""The time of a training step on a CPU beside its bound, operator by operator.

The step is that of the package: model, backward, clipping, optimizer, in fp32 without data loading
and logging. Its operators are recorded once. The bound is the sum of

* each matrix product and each attention, run alone on operands that are not in the caches;
* for every other operator the bytes that it reads and writes, at the rate of a multiplication
  that streams through memory: eager torch makes one pass over memory per operator.

What is left are dispatch, autograd and the caches, which may also make a step faster than that. "At
peak" are the operations of all products and attentions at the rate of this machine's fastest
product: no program is faster without 16-bit products or fewer operations. Operators that take more
than 2% of a step are listed with their own bound. `gpt` trains with AdamW, `modern` with Muon.

    python benchmarks/step_bound.py
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 \
      python benchmarks/step_bound.py --out avx2.json       # as on a CPU with AVX2 alone
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from common import compose_config, log, parser, report
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode
from trainers import MODERN, PLAIN, SETTINGS, Setting

from mingpt_ddp.distributed.device.device import keep_freed_memory
from mingpt_ddp.metrics.mfu import measured_matmul_flops
from mingpt_ddp.models import build_model
from mingpt_ddp.optim import build_optimizer

HEADER = [
    "model",
    "shape",
    "threads",
    "step, ms",
    "bound, ms",
    "bound / step",
    "of it products",
    "passes",
    "at peak, ms",
]
RECIPES = {"gpt": PLAIN, "modern": MODERN}
CHARACTERS = 65
COMPUTE = ("mm", "bmm", "baddbmm", "addmm", "attention")  # operators with more work than bytes
COLD = 64 << 20  # bytes of operands to rotate through
STREAM = (40, 768, 512)  # arrays, of the size of an MLP's activations
LISTED = 0.02  # of a step
STEPS = {"small": 40, "mid": 4}


@dataclass
class Operator:
    """All calls with the same name and shapes in one step."""

    name: str
    calls: int = 0
    seconds: float = 0.0  # in the step
    nbytes: int = 0  # read and written
    replay: Callable[[Any], object] | None = None  # of a call that computes
    arguments: Any = None
    bound_s: float = 0.0
    shapes: str = ""


@dataclass
class Recorder(TorchDispatchMode):
    """Records every operator that runs in this context."""

    operators: dict[Any, Operator] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        begin = time.perf_counter()
        result = function(*args, **(kwargs or {}))
        seconds = time.perf_counter() - begin
        if not function.is_view:
            self._record(function, (args, kwargs or {}), result, seconds)
        return result

    def _record(self, function: Any, arguments: Any, result: Any, seconds: float) -> None:
        tensors = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        name = function.overloadpacket.__name__
        key = (name, *((tuple(t.shape), t.stride()) for t in tensors))
        if key not in self.operators:
            self.operators[key] = Operator(name)
            shapes = [list(t.shape) for t in tensors[:3]]
            self.operators[key].shapes = " ".join(map(str, shapes))
        operator = self.operators[key]
        operator.calls += 1
        operator.seconds += seconds
        touched = {t.data_ptr(): t.numel() * t.element_size() for t in tensors}
        operator.nbytes += sum(touched.values()) + sum(t.nbytes for t in outputs)
        if operator.replay is None and any(word in name for word in COMPUTE):
            operator.replay = lambda given: function(*given[0], **given[1])
            operator.arguments = tree_map(copy, arguments)


def copy(value: Any) -> Any:
    """Return a copy of a tensor with the same strides, anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride()).copy_(value.detach())


def time_cold(operator: Operator) -> float:
    """Return the median seconds of a call whose operands are not in the caches."""
    assert operator.replay is not None
    nbytes = operator.nbytes // operator.calls
    copies = [tree_map(copy, operator.arguments) for _ in range(max(2, min(24, COLD // nbytes)))]
    seconds = []
    for given in copies * (1 + 24 // len(copies)):
        begin = time.perf_counter()
        operator.replay(given)
        seconds.append(time.perf_counter() - begin)
    return median(seconds[1:])


def stream_rate() -> float:
    """Return the bytes per second of multiplications that stream through memory."""
    arrays = list(torch.randn(STREAM))
    seconds = []
    for a, b, out in zip(arrays[::3], arrays[1::3], arrays[2::3], strict=False):
        begin = time.perf_counter()
        torch.mul(a, b, out=out)
        seconds.append(time.perf_counter() - begin)
    return 3 * arrays[0].nbytes / median(seconds)


def training(name: str, setting: Setting) -> Callable[[], None]:
    """Return a function that takes a step."""
    shape = [
        f"model.n_layer={setting.n_layer}",
        f"model.n_head={setting.n_head}",
        f"model.n_embd={setting.n_embd}",
        f"data.block_size={setting.context}",
    ]
    config = compose_config(*RECIPES[name], *shape)
    torch.manual_seed(0)
    model = build_model(config.model, CHARACTERS, setting.context)
    optimizer = build_optimizer(model, config.optimizer)
    tokens, targets = torch.randint(CHARACTERS, (2, setting.batch, setting.context))
    parameters = list(model.parameters())

    def step() -> None:
        model(tokens, targets).backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def seconds_of(step: Callable[[], None], count: int) -> Iterator[float]:
    for _ in range(count):
        begin = time.perf_counter()
        step()
        yield time.perf_counter() - begin


def count_operations() -> FlopCounterMode:
    """Return a context that counts the operations of matrix products; `get_total_flops` reads it.

    Attention in one kernel skips what is above the diagonal, half of its products.
    """

    def forward(q: Any, k: Any, v: Any, dropout: Any, causal: bool, **_: Any) -> int:
        B, H, T, D = q
        return 2 * (2 * B * H * T * k[2] * D) // (1 + causal)

    def backward(grad: Any, q: Any, k: Any, *others: Any, **_: Any) -> int:
        causal = others[4]
        return 2 * forward(q, k, None, None, causal)

    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    fused_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    mapping = {fused: forward, fused_backward: backward}
    return FlopCounterMode(display=False, custom_mapping=mapping)


def measure(name: str, shape: str, threads: int, rate: float) -> dict[str, Any]:
    torch.set_num_threads(threads)
    step = training(name, SETTINGS[shape])
    list(seconds_of(step, 3))  # warm up
    step_s = median(seconds_of(step, STEPS[shape]))
    with count_operations() as counter:
        step()
    peak = measured_matmul_flops(torch.device("cpu"), torch.float32)
    with Recorder() as recorder:
        step()
    operators = list(recorder.operators.values())
    for operator in operators:
        operator.bound_s = operator.nbytes / rate
        if operator.replay is not None:
            operator.bound_s = operator.calls * time_cold(operator)
    products = sum(o.bound_s for o in operators if o.replay is not None)
    passes = sum(o.bound_s for o in operators if o.replay is None)
    return {
        "step_ms": 1e3 * step_s,
        "products_ms": 1e3 * products,
        "passes_ms": 1e3 * passes,
        "share": (products + passes) / step_s,
        "peak_ms": 1e3 * counter.get_total_flops() / peak,
        "operators": summarize(operators, step_s),
    }


def summarize(operators: list[Operator], step_s: float) -> list[dict[str, Any]]:
    """Return the operators above `LISTED`, those of one name and these shapes together."""
    rows: dict[tuple[str, str], list[Operator]] = defaultdict(list)
    for operator in operators:
        rows[operator.name, operator.shapes].append(operator)
    listed = []
    for (name, shapes), members in rows.items():
        seconds = sum(member.seconds for member in members)
        if seconds < LISTED * step_s:
            continue
        listed.append(
            {
                "operator": name,
                "shapes": shapes,
                "calls": sum(member.calls for member in members),
                "ms": round(1e3 * seconds, 2),
                "bound_ms": round(1e3 * sum(member.bound_s for member in members), 2),
            }
        )
    return sorted(listed, key=lambda row: -row["ms"])


def main() -> None:
    options = parser(__doc__, "step_bound")
    options.add_argument("--models", nargs="+", choices=RECIPES, default=list(RECIPES))
    options.add_argument("--shapes", nargs="+", choices=STEPS, default=list(STEPS))
    options.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    chosen = options.parse_args()
    keep_freed_memory()
    results: dict[str, Any] = {}
    rows, readme = [], []
    capability = torch.backends.cpu.get_cpu_capability()
    for threads in chosen.threads:
        torch.set_num_threads(threads)
        rate = max(stream_rate() for _ in range(3))
        for shape in chosen.shapes:
            for name in chosen.models:
                found = measure(name, shape, threads, rate)
                results[f"{name}, {shape}, {threads}"] = found
                for row in found["operators"]:
                    log(f"  {row['ms']:8.2f} ms, bound {row['bound_ms']:8.2f}: {row}")
                bound = found["products_ms"] + found["passes_ms"]
                figures = [f"{found['step_ms']:.1f}", f"{bound:.1f}", f"{found['share']:.2f}"]
                parts = [f"{found[f'{part}_ms']:.1f}" for part in ("products", "passes", "peak")]
                rows.append([name, shape, str(threads), *figures, *parts])
                log(" | ".join(rows[-1]))
                what = f"a step of `{name}` in fp32 ({capability}), {shape}, threads: {threads}"
                text = f"{figures[0]} ms; {figures[1]} ms; {parts[2]} ms"
                readme.append((f"{what}: time; bound by operator; products at peak", text))
    report(chosen.out, {"capability": capability, "results": results}, HEADER, rows, readme)


if __name__ == "__main__":
    main()
