"""Read verifiers' traces, which prime-rl writes too: a graph of messages, each with its tokens.

The format is that of verifiers 0.4.0. A line is an episode with `traces`, or one trace. A message
node has the tokens that it adds to the sequence, and a `mask` that marks sampled ones. It has one
log-prob and one advantage for each sampled token.
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
    message_fields,
    row_number,
    row_reward,
    whole_number,
)
from vapo.studies.inspection.responses import InspectedResponse


def traces(row: Row, place: RowPlace) -> list[InspectedResponse]:
    """Return a response for each trace of a row, from the trace's first message to its last.

    Traces of agents that are not trainable are left out if there are others.

    Raises: RowError: nothing was sampled or scored.
    """
    if "nodes" in row:
        return [_response(row, {}, place)]
    records = row["traces"]
    if not isinstance(records, list) or not records:
        raise RowError(f"the episode has no traces{_failure(row)}")
    trainable = [x for x in records if (x.get("agent") or {}).get("trainable", True)]
    return [_response(record, row, place) for record in trainable or records]


def _failure(record: Row) -> str:
    errors = record.get("errors") or ()
    if not errors:
        return ""
    error = errors[-1]
    text = error.get("message") or error.get("type") if isinstance(error, Mapping) else error
    return f"; it ended in an error: {(str(text).splitlines() or [''])[0]:.100}"


def _response(trace: Row, episode: Row, place: RowPlace) -> InspectedResponse:
    nodes = _last_branch(trace)
    start = next((i for i, node in enumerate(nodes) if node.get("sampled")), None)
    if start is None:
        raise RowError(f"no message of the trace was sampled{_failure(trace)}")
    prompt_messages = [_message(node) for node in nodes[:start]]
    response_messages = [_message(node) for node in nodes[start:]]
    task, info = trace.get("task") or episode.get("task") or {}, trace.get("info") or {}
    data = task.get("data") or {}
    step = _step(episode, info)
    group = (episode.get("group") or {}).get("id") or info.get("group_id")
    prompt = place.rendered(prompt_messages)
    return place.response(
        place.step if step is None else step,
        group or task.get("key") or task.get("hash") or prompt,
        prompt=prompt,
        reward=_reward(trace, place),
        is_truncated=_is_truncated(trace),
        answer=answer_of(data, "answer"),
        **message_fields(response_messages),
        **_token_lists(nodes),
    )


def _last_branch(trace: Row) -> list[Row]:
    """Return the messages from the root of the trace to its last message.

    Raises: RowError: the trace has no messages, or their parents form no path to the root.
    """
    nodes = trace.get("nodes")
    if not isinstance(nodes, list) or not nodes:
        raise RowError(f"the trace has no messages{_failure(trace)}")
    branch: list[Row] = []
    place: Any = len(nodes) - 1
    while place is not None:
        if not isinstance(place, int) or not 0 <= place < len(nodes) or len(branch) > len(nodes):
            raise RowError(
                f"a message's parent is {place!r}: the messages are numbered 0 to "
                f"{len(nodes) - 1}, and none may be its own ancestor"
            )
        branch.append(nodes[place])
        place = nodes[place].get("parent")
    return branch[::-1]


def _message(node: Row) -> Mapping[str, Any]:
    message = node.get("message")
    if not isinstance(message, Mapping):
        raise RowError("a node of the trace has no message")
    return message


def _reward(trace: Row, place: RowPlace) -> float:
    """Return the trace's reward: the sum of its weighted rewards, as verifiers computes it.

    If the user named columns (`place.rewards`), it is their sum.

    Raises: RowError: there is no reward, or one is null or not a number.
    """
    if place.rewards:
        return row_reward(trace, place.rewards)
    rewards = trace.get("rewards")
    if not isinstance(rewards, Mapping) or not rewards:
        raise RowError(f"the trace was not scored{_failure(trace)}")
    total = 0.0
    for name, entry in rewards.items():
        if entry is None:
            raise RowError(f"the reward {name} is null: it was not scored{_failure(trace)}")
        if isinstance(entry, Mapping):
            weight = row_number(entry, "weight") if "weight" in entry else 1.0
            total += row_number(entry, "score") * weight
        else:
            total += row_number(rewards, name)
    return total


def _step(episode: Row, info: Row) -> int | None:
    work = (episode.get("run") or {}).get("work") or {}
    prime_rl = info.get("prime_rl") or {}
    candidates = (work.get("step"), prime_rl.get("step"), prime_rl.get("train_step"))
    return next((step for x in candidates if (step := whole_number(x)) is not None), None)


def _is_truncated(trace: Row) -> bool:
    calls = [call for call in trace.get("calls") or () if not call.get("error")]
    reasons = [trace.get("stop_condition"), *(call.get("finish_reason") for call in calls[-1:])]
    return any(map(is_cut_short, reasons))


def _token_lists(nodes: Sequence[Row]) -> dict[str, Any]:
    """Return `InspectedResponse` fields: the ids of prompt and response, and the response's lists.

    The response begins at the first sampled token. Log-probs and advantages of tokens that were not
    sampled are 0. The result is {} if a node lacks tokens or none was sampled.
    """
    ids: list[int] = []
    mask: list[bool] = []
    columns: dict[str, list[float] | None] = {"logprobs": [], "advantages": []}
    for node in nodes:
        node_ids, node_mask = entries(node, "token_ids", int), entries(node, "mask", bool)
        if not node_ids or node_mask is None or len(node_ids) != len(node_mask):
            return {}
        ids += node_ids
        mask += node_mask
        num_sampled = sum(node_mask)
        for name, column in columns.items():
            numbers = entries(node, name, float)
            if column is None or (num_sampled and (not numbers or len(numbers) != num_sampled)):
                columns[name] = None
            else:
                remaining = iter(numbers or ())
                column += [next(remaining) if is_sampled else 0.0 for is_sampled in node_mask]
    if True not in mask:
        return {}
    start = mask.index(True)
    response_mask = tuple(mask[start:])
    return {
        "prompt_ids": tuple(ids[:start]),
        "response_ids": tuple(ids[start:]),
        "is_sampled": None if all(response_mask) else response_mask,
        **{
            name: None if column is None else tuple(column[start:])
            for name, column in columns.items()
        },
    }
