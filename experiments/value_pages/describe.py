"""What a value page's charts say, in one line a page.

    python experiments/value_pages/describe.py PAGE.html ...

EV: explained variance of the page's first and last fifth of positions, and of all of them, each
the mean over its positions weighted by tokens. bias: mean value less mean return, likewise.
drift: mean change of the value from a response's first token to its last, of the responses shown;
spread: standard deviation of the value over the calibration's bins. advantage: before whitening,
mean in the first and the last fifth. length: correlation of a response's mean advantage with its
number of tokens, over the responses shown.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


def page_data(page: Path) -> dict[str, Any]:
    start = page.read_text(encoding="utf-8").partition('id="data">')[2]
    data = json.loads(start.partition("</script")[0])
    assert isinstance(data, dict)
    return data


def column(response: dict[str, Any], name: str) -> np.ndarray:
    packed, num = response["columns"][name], len(base64.b64decode(response["ids"])) // 4
    if isinstance(packed, float):
        return np.full(num, packed)
    return np.frombuffer(base64.b64decode(packed), "<f4")


def token_texts(data: Mapping[str, Any], response: dict[str, Any]) -> list[str]:
    return [data["tokens"][str(i)] for i in np.frombuffer(base64.b64decode(response["ids"]), "<i4")]


def parts(rows: dict[str, list[Any]], numbers: list[float | None]) -> str:
    """Means weighted by tokens over the first fifth of positions, the last fifth, and all."""
    means = []
    places = np.array(rows["position"])
    last = places.max()
    is_known = np.array([x is not None for x in numbers])
    filled = np.array([0.0 if x is None else x for x in numbers])
    tokens = np.array(rows["num_tokens"])
    for selected in (places <= 0.2 * last, places >= 0.8 * last, places >= 0):
        counted = selected & is_known
        means.append(
            float(np.average(filled[counted], weights=tokens[counted])) if counted.any() else None
        )
    return " ".join("-" if x is None else f"{x:+.3f}" for x in means)


def describe(data: dict[str, Any]) -> str:
    rows, bins = data["positions"], data["calibration"]
    responses = [response for group in data["groups"] for response in group["responses"]]
    words = []
    if "value_mean" in rows:
        bias = np.subtract(rows["value_mean"], rows["return_mean"]).tolist()
        words += [f"EV {parts(rows, rows['explained_variance'])}", f"bias {parts(rows, bias)}"]
        values = [column(response, "value") for response in responses]
        words.append(f"drift {np.mean([v[-1] - v[0] for v in values]):+.3f}")
        mean = np.average(bins["value_mean"], weights=bins["num_tokens"])
        squares = np.square(np.subtract(bins["value_mean"], mean))
        words.append(f"spread {np.average(squares, weights=bins['num_tokens']) ** 0.5:.3f}")
    if "advantage_mean" in rows:
        words.append(f"advantage {parts(rows, rows['advantage_mean'])}")
        means = [column(response, "advantage").mean() for response in responses]
        lengths = [response["num_tokens"] for response in responses]
        words.append(f"length {np.corrcoef(means, lengths)[0, 1]:+.2f}")
    return "; ".join(words)


if __name__ == "__main__":
    for path in map(Path, sys.argv[1:]):
        print(f"{path.stem}: {describe(page_data(path))}")
