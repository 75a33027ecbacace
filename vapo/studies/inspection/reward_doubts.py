"""Doubts about the returns of files that may lack the rewards of single turns or tokens.

The true returns then differ from the reward at the end, so no verdict that rests on returns is
called a fault.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from vapo.studies.inspection.remarks import Remark, Remarks
from vapo.studies.inspection.running import RunningSums

DOUBT_ABOVE = 0.01  # share of the responses


def doubt_reason(sums: RunningSums) -> str:
    """Return why the true returns may differ from the returns that were computed from the file.

    The text is "" if nothing in the file suggests it.
    """
    for num, why in (
        (
            sums.num_ending_otherwise,
            "the file's own return at the last token is not the reward (a penalty for length or "
            "KL, or rewards along the way)",
        ),
        (
            sums.num_with_turns,
            "there are several turns, which may have been rewarded one by one",
        ),
    ):
        if num > DOUBT_ABOVE * sums.num_with_values:
            return f"In {num:,} of {sums.num_with_values:,} responses {why}"
    return ""


def with_doubt(remarks: Iterable[Remark | str], reason: str) -> Remarks:
    """Turn faults into notes that mention the doubt about the returns, and add a note on its
    reason.

    The fault of a constant critic stays, because that verdict does not rest on the returns.
    Questions that are open (texts) pass through.

    Args:
        reason: what `doubt_reason` returned.
    """
    for item in remarks:
        if isinstance(item, str) or item.severity != "wrong" or item.anchor == "inspect-constant":
            yield item
        else:
            text = f"{item.text} But the returns may be others, see below."
            yield replace(item, severity="note", text=text)
    yield Remark(
        "inspect-rewards",
        "note",
        "Rewards along the way may be missing",
        f"{reason}. The file has no token_rewards, so each return is taken as the response's "
        "reward.",
        "Write the reward of every token as token_rewards (verl's token_level_rewards): returns "
        "are then their sums from the token on.",
    )
