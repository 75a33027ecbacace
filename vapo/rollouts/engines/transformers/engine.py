"""The Transformers engine with weights of its own, for a process that serves it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext

import torch
from torch import Tensor
from transformers import PreTrainedModel

from vapo.rollouts.engines.contract import SampledTurn, SamplingSettings, TurnRequest
from vapo.rollouts.engines.engine import EngineError, Generated, Request
from vapo.rollouts.engines.stepped import SteppedEngine
from vapo.rollouts.engines.transformers.detached import take_weights
from vapo.rollouts.engines.transformers.turns import TransformersTurns
from vapo.rollouts.engines.turn_requests import NonFiniteLogitsError

_EPISODES = 4  # are known for each row; caches are kept of fewer
_NO_LIMIT = 1 << 30  # positions of a model that names none

_Key = tuple[int, int]  # a number that equal prompts share, and one of its own


class TransformersEngine(SteppedEngine):
    """See `Engine`: a request's tokens are those that the trainer's own engine would sample.

    `model` becomes the engine's. Requests with different settings are decoded beside each other,
    in turns; of each, at most `max_rows` together.
    """

    def __init__(self, model: PreTrainedModel, *, max_rows: int, device: torch.device) -> None:
        super().__init__()
        self._model = model.to(device).eval().requires_grad_(False)  # type: ignore[arg-type]
        self._max_rows, self._device = max_rows, device
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        self.max_tokens = positions or _NO_LIMIT
        self.has_weights = False
        self._streams: dict[tuple[SamplingSettings, frozenset[int]], TransformersTurns] = {}
        self._open: dict[str, tuple[_Key, TransformersTurns]] = {}
        self._names: dict[_Key, str] = {}
        self._seeds: dict[_Key, int] = {}
        self._has_episode: set[_Key] = set()
        self._episodes: dict[str, _Key] = {}  # those sampled longest ago first

    def _begin(
        self,
        requests: Mapping[str, Request],
        settings: SamplingSettings,
        end_ids: frozenset[int],
    ) -> None:
        stream = self._stream(settings, end_ids)
        groups: dict[tuple[int, ...], int] = {}
        # As `Player.play`: longest first, and equal prompts share their prefill.
        for name, request in sorted(requests.items(), key=lambda r: -len(r[1].prompt_ids)):
            group = groups.setdefault(request.prompt_ids, next(self._numbers))
            key = self._key(request.episode, group)
            self._names[key], self._seeds[key] = name, request.seed
            ids, most = request.prompt_ids, request.budget(settings)
            stream.submit(TurnRequest(key, 0, ids, most, f"of {len(ids)} tokens"))
            self._open[name] = key, stream

    def _step(self) -> dict[str, Generated]:
        found = {}
        with torch.no_grad():
            for stream in list(self._streams.values()):
                for turn in self._stepped(stream):
                    key = turn.request.key
                    name = self._names.pop(key)
                    del self._open[name], self._seeds[key]
                    found[name] = Generated(turn.ids, turn.logprobs)
                    if key not in self._has_episode:
                        stream.forget(key)
        self._streams = {k: s for k, s in self._streams.items() if s.num_open or s.num_kept}
        return found

    def _drop(self, names: Collection[str]) -> None:
        for name in names:
            key, stream = self._open.pop(name, (None, None))
            if key is not None and stream is not None:
                stream.forget(key)
                del self._names[key], self._seeds[key]

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `Engine.load`. Requests under way go on with their caches; no others are kept.

        Raises:
            EngineError: the weights are not the model's.
        """
        with self._turn(), torch.no_grad():
            for stream in self._streams.values():
                stream.forget_kept()
            try:
                take_weights(self._model, weights)
            except (ValueError, RuntimeError) as error:
                raise EngineError(str(error)) from error
        self.has_weights = True

    def sleep(self) -> None:
        """Nothing to free."""

    def close(self) -> None:
        """Nothing to free."""

    def _stream(self, settings: SamplingSettings, end_ids: frozenset[int]) -> TransformersTurns:
        if (settings, end_ids) not in self._streams:
            self._streams[settings, end_ids] = TransformersTurns(
                self._model,
                settings,
                draw_seed=lambda request: self._seeds[request.key],
                stop_ids=end_ids,
                max_rows=self._max_rows,
                device=self._device,
                take_turns=nullcontext,
            )
        return self._streams[settings, end_ids]

    def _key(self, episode: str | None, group: int) -> _Key:
        if episode is None:
            return group, next(self._numbers)
        key = self._episodes.pop(episode, None)
        if key is None or key in self._names:  # a turn that its client has given up is open
            key = group, next(self._numbers)
        self._episodes[episode] = key
        self._has_episode.add(key)
        if len(self._episodes) > _EPISODES * self._max_rows:
            oldest = self._episodes.pop(next(iter(self._episodes)))
            self._has_episode.discard(oldest)
            for stream in self._streams.values():
                if oldest not in self._names:
                    stream.forget(oldest)
        return key

    def _stepped(self, stream: TransformersTurns) -> list[SampledTurn]:
        try:
            return stream.step()
        except NonFiniteLogitsError as error:
            raise EngineError(str(error)) from error
