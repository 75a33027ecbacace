"""Where rewards along the way are missing, the returns are others than the reward at the end.

Nothing that rests on them is called wrong then.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from vapo.studies.inspection.remarks import Remark, Said
from vapo.studies.inspection.running import RunningSums

DOUBT_ABOVE = 0.01  # share of the responses


def in_doubt(sums: RunningSums) -> str:
    """Why the returns may be others than these figures take them for; empty: they are not."""
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


def doubted(remarks: Iterable[Remark | str], why: str) -> Said:
    """What rests on the returns is not called wrong where these may be others."""
    for one in remarks:
        if isinstance(one, str) or one.severity != "wrong" or one.anchor == "inspect-constant":
            yield one
        else:
            text = f"{one.text} But the returns may be others, see below."
            yield replace(one, severity="note", text=text)
    yield Remark(
        "inspect-rewards",
        "note",
        "Rewards along the way may be missing",
        f"{why}. The file has no token_rewards, so each return is taken as the response's reward.",
        "Write the reward of every token as token_rewards (verl's token_level_rewards): returns "
        "are then their sums from the token on.",
    )
