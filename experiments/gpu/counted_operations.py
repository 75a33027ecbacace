"""What a micro-batch's update asks of a GPU: operations and bytes, counted without one.

    python experiments/gpu/counted_operations.py [--shape qwen2.5_0.5b] [--rows 24]

The product's forward and backward pass runs on tensors without values, with the dtypes and kernels
of a GPU. An operation that reads or writes memory is about one kernel that the host starts. Bytes
are those of its operands and results, which caches make fewer.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from training_tables import table  # beside this file

from vapo.networks.model_configs import read_model_config
from vapo.networks.value_head import ValueHead, write_head
from vapo.studies.estimate.memory_tracker import MemoryTracker
from vapo.studies.estimate.passes import FakeNetwork
from vapo.studies.estimate.shapes import NetworkShape
from vapo.system.host_memory import GIB

SHAPES = Path(__file__).parents[2] / "models/shapes"


class Counting(TorchDispatchMode):
    """Operations that make or change tensors; those that return a view of one do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, kwargs, result)) if isinstance(x, torch.Tensor)]
        name = func.overloadpacket.__name__
        if func.namespace != "aten" or func.is_view or name == "_unsafe_view" or not tensors:
            return result
        self.calls[name] += 1
        self.bytes[name] += sum(tensor.nbytes for tensor in tensors)
        return result


class CountedNetwork(FakeNetwork):
    """Counts the operations of its passes, too."""

    def __init__(self, shape: NetworkShape) -> None:
        super().__init__(shape)
        self.counting = Counting()

    @contextmanager
    def _tracked(self) -> Iterator[MemoryTracker]:
        with super()._tracked() as tracker, self.counting:
            yield tracker


def count(network: str, recomputes: bool, arguments: argparse.Namespace) -> list[str]:
    config = read_model_config(str(SHAPES / arguments.shape))
    kind: Any = "causal_lm" if network == "actor" else "value_model"
    if network == "critic":
        write_head(config, ValueHead())
    counted = CountedNetwork(
        NetworkShape(kind, config, "float32", "auto", recomputes, autocast=True, on_gpu=True)
    )
    sizes = {"prompt_tokens": arguments.prompt_tokens, "response_tokens": arguments.response_tokens}
    kept_gib, peak = counted.update(rows=arguments.rows, prompts=arguments.prompts, **sizes)
    counting = counted.counting
    largest = ", ".join(f"`{n}` {b / 1e9:.0f}" for n, b in counting.bytes.most_common(5))
    numbers = (f"{counting.calls.total():,}", f"{counting.bytes.total() / 1e9:.0f}", largest)
    return [
        network,
        "yes" if recomputes else "no",
        *numbers,
        f"{kept_gib / GIB:.2f}",
        f"{peak / GIB:.2f}",
    ]


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", default="qwen2.5_0.5b", help="a folder of models/shapes")
    parser.add_argument("--rows", type=int, default=24, help="responses of the micro-batch")
    parser.add_argument("--prompts", type=int, default=12, help="that they answer")
    parser.add_argument("--prompt_tokens", type=int, default=130)
    parser.add_argument("--response_tokens", type=int, default=512)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    parsed = options(arguments)
    tokens = parsed.rows * parsed.response_tokens + parsed.prompts * parsed.prompt_tokens
    print(f"{parsed.shape}, {tokens:,} tokens, bf16-mixed, torch {torch.__version__}\n")
    columns = ("network", "recomputes", "operations", "GB", "of these", "GiB kept", "GiB at most")
    networks = [(name, again) for name in ("critic", "actor") for again in (True, False)]
    print(table(columns, [count(name, again, parsed) for name, again in networks]))


if __name__ == "__main__":
    main()
