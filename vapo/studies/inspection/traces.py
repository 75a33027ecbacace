"""verifiers' traces, which prime-rl writes, too: a graph of messages, each with its tokens.

Read from verifiers 0.4.0: a line is an episode with `traces`, or one trace. A message node has the
tokens that it adds to the sequence, `mask` of those that were sampled, and one log-prob and credit
for each of these.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vapo.studies.inspection.fields import (
    Row,
    RowError,
    RowPlace,
    answer_of,
    entries,
    is_cut_short,
    row_number,
    row_reward,
    whole_number,
    words_of,
)
from vapo.studies.inspection.responses import InspectedResponse


def traces(row: Row, place: RowPlace) -> list[InspectedResponse]:
    """A response for each trace of an episode, the longest way through its messages.

    Raises: RowError: nothing was sampled or scored.
    """
    if "nodes" in row:
        return [_response(row, {}, place)]
    found = row["traces"]
    if not isinstance(found, list) or not found:
        raise RowError(f"the episode has no traces{_failure(row)}")
    agents = [one for one in found if (one.get("agent") or {}).get("trainable", True)]
    return [_response(one, row, place) for one in agents or found]


def _failure(record: Row) -> str:
    errors = record.get("errors") or ()
    if not errors:
        return ""
    last = errors[-1]
    said = last.get("message") or last.get("type") if isinstance(last, Mapping) else last
    return f"; it ended in an error: {(str(said).splitlines() or [''])[0]:.100}"


def _response(trace: Row, episode: Row, place: RowPlace) -> InspectedResponse:
    nodes = _last_branch(trace)
    first = next((i for i, node in enumerate(nodes) if node.get("sampled")), None)
    if first is None:
        raise RowError(f"no message of the trace was sampled{_failure(trace)}")
    asked = [_message(node) for node in nodes[:first]]
    said = [_message(node) for node in nodes[first:]]
    task, info = trace.get("task") or episode.get("task") or {}, trace.get("info") or {}
    data = task.get("data") or {}
    step = _step(episode, info)
    group = (episode.get("group") or {}).get("id") or info.get("group_id")
    prompt = place.rendered(asked)
    return place.response(
        place.step if step is None else step,
        group or task.get("key") or task.get("hash") or prompt,
        prompt=prompt,
        reward=_reward(trace, place),
        is_truncated=_is_truncated(trace),
        answer=answer_of(data, "answer"),
        **words_of(said),
        **_token_lists(nodes),
    )


def _last_branch(trace: Row) -> list[Row]:
    """The messages from a root to the last one, by their parents."""
    nodes = trace.get("nodes")
    if not isinstance(nodes, list) or not nodes:
        raise RowError(f"the trace has no messages{_failure(trace)}")
    branch: list[Row] = []
    place: Any = len(nodes) - 1
    while place is not None:
        if not isinstance(place, int) or not 0 <= place < len(nodes) or len(branch) > len(nodes):
            raise RowError(f"a message's parent is {place!r}, which is none of {len(nodes)}")
        branch.append(nodes[place])
        place = nodes[place].get("parent")
    return branch[::-1]


def _message(node: Row) -> Mapping[str, Any]:
    message = node.get("message")
    if not isinstance(message, Mapping):
        raise RowError("a node of the trace has no message")
    return message


def _reward(trace: Row, place: RowPlace) -> float:
    """The sum of the weighted rewards, as verifiers has it."""
    if place.rewards:
        return row_reward(trace, place.rewards)
    rewards = trace.get("rewards")
    if not isinstance(rewards, Mapping) or not rewards:
        raise RowError(f"the trace was not scored{_failure(trace)}")
    total = 0.0
    for name, found in rewards.items():
        if found is None:
            raise RowError(f"the reward {name} is null: it was not scored{_failure(trace)}")
        if isinstance(found, Mapping):
            weight = row_number(found, "weight") if "weight" in found else 1.0
            total += row_number(found, "score") * weight
        else:
            total += row_number(rewards, name)
    return total


def _step(episode: Row, info: Row) -> int | None:
    work = (episode.get("run") or {}).get("work") or {}
    of_prime_rl = info.get("prime_rl") or {}
    steps = (work.get("step"), of_prime_rl.get("step"), of_prime_rl.get("train_step"))
    return next((found for step in steps if (found := whole_number(step)) is not None), None)


def _is_truncated(trace: Row) -> bool:
    calls = [call for call in trace.get("calls") or () if not call.get("error")]
    reasons = [trace.get("stop_condition"), *(call.get("finish_reason") for call in calls[-1:])]
    return any(map(is_cut_short, reasons))


def _token_lists(nodes: Sequence[Row]) -> dict[str, Any]:
    """Tokens of prompt and response, parted at the first sampled one; none where a node has none.

    What is of sampled tokens alone is 0 on the others.
    """
    ids: list[int] = []
    mask: list[bool] = []
    of_sampled: dict[str, list[float] | None] = {"logprobs": [], "advantages": []}
    for node in nodes:
        own, own_mask = entries(node, "token_ids", int), entries(node, "mask", bool)
        if not own or own_mask is None or len(own) != len(own_mask):
            return {}
        ids += own
        mask += own_mask
        for name, column in of_sampled.items():
            found = entries(node, name, float)
            if column is None or (sum(own_mask) and (not found or len(found) != sum(own_mask))):
                of_sampled[name] = None
            else:
                place = iter(found or ())
                column += [next(place) if sampled else 0.0 for sampled in own_mask]
    if True not in mask:
        return {}
    start = mask.index(True)
    columns = {
        name: None if column is None else tuple(column[start:])
        for name, column in of_sampled.items()
    }
    sampled = tuple(mask[start:])
    return {
        "prompt_ids": tuple(ids[:start]),
        "response_ids": tuple(ids[start:]),
        "is_sampled": None if all(sampled) else sampled,
        **columns,
    }
