"""What torch's allocator would hold on a GPU while the engine `transformers` decodes.

    python experiments/bench/held_memory.py --attention ours --rows 256 --tokens 256

samples on a CPU from a made-up policy with the heads of Qwen2.5-0.5B and two narrow layers, and
replays every allocation by the rules of torch's caching allocator: sizes are rounded, the smallest
free block that fits is cut, neighbours are joined again, and memory that was taken is never given
back. Fewer layers need less for keys and values; what a layer needs while it computes, and what is
held for that, is that of any number of layers. `--attention transformers` is what Transformers does
where the engine does not put its own function in.
"""

from __future__ import annotations

import argparse
import bisect
import random
import weakref
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import PreTrainedTokenizerBase, Qwen2Config, Qwen2ForCausalLM

from vapo.networks.loading import load_tokenizer
from vapo.rollouts.engines.contract import SamplingSettings, TurnRequest
from vapo.rollouts.engines.transformers import sampler as engine
from vapo.rollouts.engines.transformers.detached import DetachedTransformersSampler
from vapo.system.host_memory import GIB, MIB


class Allocator:
    """Torch's caching allocator of one stream, with its default options."""

    def __init__(self) -> None:
        self.allocated = self.peak = self.held_bytes = 0
        self._free: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}  # by is_small
        self._segments: list[dict[int, tuple[int, bool]]] = []  # of each, place: (size, is_used)
        self._places: dict[int, tuple[int, int, bool]] = {}

    def take(self, key: int, size: int) -> None:
        size = max(512, -(-size // 512) * 512)
        is_small = size <= MIB
        free = self._free[is_small]
        index = bisect.bisect_left(free, (size, -1, -1))
        if index < len(free):
            whole, segment, place = free.pop(index)
        else:
            rounded = 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            whole, segment, place = 2 * MIB if is_small else rounded, len(self._segments), 0
            self._segments.append({})
            self.held_bytes += whole
        rest = whole - size
        if rest >= 512 if is_small else rest > MIB:
            self._segments[segment][place + size] = rest, False
            bisect.insort(free, (rest, segment, place + size))
            whole = size
        self._segments[segment][place] = whole, True
        self._places[key] = segment, place, is_small
        self.allocated += whole
        self.peak = max(self.peak, self.allocated)

    def give_back(self, key: int) -> None:
        segment, place, is_small = self._places.pop(key)
        blocks, free = self._segments[segment], self._free[is_small]
        size, _ = blocks.pop(place)
        self.allocated -= size
        previous = max((p for p in blocks if p < place), default=-1)
        for neighbour in (place + size, previous):
            if neighbour in blocks and not blocks[neighbour][1]:
                more, _ = blocks.pop(neighbour)
                del free[bisect.bisect_left(free, (more, segment, neighbour))]
                place, size = min(place, neighbour), size + more
        blocks[place] = size, False
        bisect.insort(free, (size, segment, place))


class Replay(TorchDispatchMode):
    """Tells an allocator of every storage that is made, and of its end."""

    def __init__(self, allocator: Allocator) -> None:
        super().__init__()
        self.allocator, self._live_storages, self._count = allocator, set[int](), 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes():
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        name = id(storage)
        if name in self._live_storages:
            return
        self._live_storages.add(name)
        self._count += 1
        self.allocator.take(self._count, storage.nbytes())
        weakref.finalize(storage, self._end, name, self._count)

    def _end(self, name: int, key: int) -> None:
        self._live_storages.discard(name)
        self.allocator.give_back(key)


def policy(tokenizer: PreTrainedTokenizerBase) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=14,
        num_key_value_heads=2,
        head_dim=64,  # type: ignore[call-arg]  # a config takes any key
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
    )
    torch.manual_seed(0)
    return Qwen2ForCausalLM(config).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--attention", choices=("ours", "transformers"), default="ours")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.attention == "transformers":
        vars(engine)["decoding_attention"] = lambda model: nullcontext()
    tokenizer = load_tokenizer("models/state_tracking/policy")
    sampler = DetachedTransformersSampler(
        policy(tokenizer),
        tokenizer,
        mixed_dtype=torch.bfloat16,
        max_concurrent_sequences=options.rows,
        device="cpu",
    )
    sampler.end_ids = frozenset()  # every response is as long as it may be
    settings = SamplingSettings(
        max_response_tokens=options.tokens, temperature=1.0, top_p=1.0, top_k=0
    )
    draw, allocator = random.Random(0), Allocator()
    with Replay(allocator), sampler.turns(settings, seed=0) as turns:
        for index in range(options.rows):
            if index % 8 == 0:
                ids = tuple(draw.randrange(2, len(tokenizer)) for _ in range(draw.randint(60, 160)))
            key = (index // 8, index % 8)
            turns.submit(TurnRequest(key, turn=0, ids=ids, max_tokens=options.tokens))
        steps = 0
        while turns.num_open:
            turns.step()
            steps += 1
            if steps % 4 == 0 or not turns.num_open:
                print(
                    f"{8 * steps:4} forward passes: at most {allocator.peak / GIB:.2f} GiB "
                    f"allocated, {allocator.held_bytes / GIB:.2f} held",
                    flush=True,
                )


if __name__ == "__main__":
    main()
