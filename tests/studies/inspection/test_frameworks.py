"""Files of other frameworks become the same record; fixtures/README.md says how each was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch

from tests.studies.inspection.files import FIXTURES, lines, read
from vapo.errors import UserError
from vapo.studies.inspection.reading import ResponseReader
from vapo.studies.inspection.responses import BadRow, InspectedResponse


def test_verl() -> None:
    """Both of its trainers' dumps; the newer has ids of prompt, rollout and turn."""
    good, bad, notes = read(FIXTURES / "verl")
    assert bad == []
    assert [one.step for one in good] == [1] * 8 + [2] * 8
    assert good[2].prompt == (
        "system\nYou are a helpful assistant.\nuser\nWhat is 2 + 3?\nassistant\n"
    )
    assert (good[2].response, good[2].reward, good[2].answer) == ("2 + 3 is 5", 1.0, "5")
    groups = [one.group for one in good]
    assert [len(set(groups[start : start + 4])) for start in (0, 4, 8, 12)] == [1] * 4
    assert len(set(groups)) == 4
    assert "16 responses read as verl's dumped rollouts" in notes
    assert "without special tokens" in notes
    assert "no values" in notes


def test_verl_s_sessions_count_once(tmp_path: Path) -> None:
    """A session with several outputs has a row for each; the last has its score."""
    uids = ["a_b_0_0", "a_b_0_1", "a_b_1_0", "a_c_0_0", "a_c_0_10", "plain"]
    rows = [
        {"input": f"asked {uid}", "output": "b", "score": float(number), "step": 1, "uid": uid}
        for number, uid in enumerate(uids)
    ]
    good, bad, notes = read(lines(tmp_path / "1.jsonl", rows))
    assert bad == []
    assert [one.reward for one in good] == [1.0, 2.0, 4.0, 5.0]
    assert [one.group == good[0].group for one in good] == [True, True, False, False]
    assert "2 rows of earlier outputs of verl's sessions are left out" in notes


def test_trl() -> None:
    """Two optimizer steps of one batch log the same completions twice."""
    good, bad, notes = read(FIXTURES / "trl")
    assert bad == []
    assert len(good) == 32
    assert {one.step for one in good} == {1, 3}
    assert {one.answer for one in good} <= set("0123456789")
    assert len({one.group for one in good}) == 8
    assert {one.reward for one in good} == {-1.0, 1.0}
    assert all(isinstance(one.response, str) and one.response for one in good)
    assert "TRL's completions" in notes
    assert "2 files repeat the one before them" in notes
    assert "advantages" in notes


def test_trl_s_weights_show_in_its_advantages(tmp_path: Path) -> None:
    """The reward is the sum of its functions; with other weights the advantages disagree."""
    rewards = {"x": (1.0, 0.0), "y": (0.0, 3.0), "z": (1.0, 0.5), "w": (0.0, 2.0)}
    rows = [
        {"step": 1, "prompt": "a", "completion": text, "right": right, "short": short,
         "advantage": right - 0.5}
        for text, (right, short) in rewards.items()
    ]  # fmt: skip
    parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "completions_00001.parquet")
    good, _, notes = read(tmp_path)
    assert [one.reward for one in good] == [1.0, 3.0, 1.5, 2.0]
    assert "in 4 of 4 pairs the advantages of one group do not follow" in notes
    good, _, notes = read(tmp_path, rewards=["right"])
    assert [one.reward for one in good] == [1.0, 0.0, 1.0, 0.0]
    assert "do not follow" not in notes


def test_one_file_of_trl_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several, columns are compared first; their rows are made once. One row of a group is
    looked at before, for the length of its texts."""
    file = parquet.ParquetFile
    read_columns = list[Any]()

    class Counted(file):  # type: ignore[misc, valid-type]
        def iter_batches(self, num_rows: int, **options: Any) -> Any:
            if num_rows > 1:
                read_columns.append(options.get("columns"))
            return super().iter_batches(num_rows, **options)

    monkeypatch.setattr(parquet, "ParquetFile", Counted)
    row = {"step": 1, "prompt": "a", "completion": "b", "f": 1.0, "advantage": float("nan")}
    for name in ("completions_00001", "completions_00002"):
        parquet.write_table(pa.Table.from_pylist([row, row]), tmp_path / f"{name}.parquet")
    good, bad, _ = read(tmp_path / "completions_00001.parquet")
    assert read_columns == [None]
    assert bad == []
    assert [(one.reward, one.not_finite) for one in good] == [(1.0, ("advantages",))] * 2
    assert len(read(tmp_path)[0]) == 2
    assert read_columns[1:] == [["prompt", "completion", "f", "advantage"], None, read_columns[1]]


def test_a_reward_function_without_a_verdict_counts_nothing(tmp_path: Path) -> None:
    row = {"step": 1, "prompt": "a", "completion": "b", "f": None, "g": 0.5, "advantage": 0.0}
    parquet.write_table(pa.Table.from_pylist([row, row | {"f": 1.0}]), tmp_path / "x.parquet")
    assert [one.reward for one in read(tmp_path)[0]] == [0.5, 1.5]


def test_verifiers_results() -> None:
    good, bad, notes = read(FIXTURES / "verifiers_0.1")
    assert bad == []
    assert [one.prompt for one in good] == ["What is 2 + 3?"] * 4 + ["What is 7 - 4?"] * 4
    assert [one.reward for one in good] == [1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0]
    assert (good[2].response, good[2].answer) == ("2 + 3 is 5", "5")
    assert len({one.group for one in good}) == 2
    assert "verifiers' or prime-rl's results" in notes


def test_verifiers_traces() -> None:
    """Episodes with tokens: the generation prompt is the prompt's, a tool's answer observed."""
    good, bad, notes = read(FIXTURES / "verifiers_0.4")
    assert len(good) == 8
    assert [one.reason for one in bad] == [
        "the trace has no messages; it ended in an error: the sandbox was lost"
    ]
    first, cut, last = good[0], good[1], good[7]
    assert (first.prompt, first.response, first.answer) == ("What is 2 + 3?", "5", "5")
    assert first.reward == pytest.approx(1.05)
    assert first.prompt_ids is not None
    assert first.prompt_ids[-1] == 2
    assert first.response_ids == (100 + ord("5"), 3)
    assert first.logprobs == (-0.25, -0.25)
    assert first.advantages == (0.5, 0.5)
    assert first.is_sampled is None
    assert (first.step, first.is_truncated, cut.is_truncated) == (3, False, True)
    assert last.response == "assistant: 3\ntool: 3\nassistant: so 3"
    assert last.is_sampled == (True, True, False, False, False, True, True)
    assert last.logprobs == (-0.25, -0.25, 0.0, 0.0, 0.0, -0.5, -0.5)
    assert len({one.group for one in good}) == 2
    assert "verifiers' or prime-rl's episodes" in notes


def test_a_trace_alone_as_prime_rl_writes_it(tmp_path: Path) -> None:
    """One on each line, in step_N/train_rollouts.jsonl; its messages may have no tokens."""
    node = {"message": {"role": "user", "content": "a"}, "sampled": False, "parent": None}
    said = {"message": {"role": "assistant", "content": "b"}, "sampled": True, "parent": 0}
    trace = {"nodes": [node, said], "rewards": {"correct": 1.0}, "errors": None, "task": {}}
    unscored = trace | {"rewards": {"correct": None}, "errors": ["timeout"]}
    lost = trace | {"nodes": [node, said | {"parent": 5}]}
    folder = tmp_path / "step_12"
    folder.mkdir()
    path = lines(folder / "train_rollouts.jsonl", [trace, unscored, lost])
    good, bad, _ = read(tmp_path)
    assert [(one.prompt, one.response, one.reward, one.step) for one in good] == [("a", "b", 1, 12)]
    assert good[0].response_ids is None
    assert bad == [
        BadRow(
            f"{path}, row 2",
            "the reward correct is null: it was not scored; it ended in an error: timeout",
        ),
        BadRow(
            f"{path}, row 3",
            "a message's parent is 5: the messages are numbered 0 to 1, and none may be its own "
            "ancestor",
        ),
    ]


SAMPLE = {
    "group_index": 0, "index": 3, "prompt": "a b", "tokens": [1, 2, 3, 4, 5], "response": "cde",
    "response_length": 3, "label": "7", "reward": {"acc": 1.0, "len": 0.2},
    "loss_mask": [1, 0, 1], "rollout_log_probs": [-0.1, 0.0, -0.3], "status": "truncated",
}  # fmt: skip


def test_slime_s_rollouts(tmp_path: Path) -> None:
    path = tmp_path / "data_7.pt"
    samples = [SAMPLE, SAMPLE | {"status": "aborted"}]
    torch.save({"rollout_id": 7, "samples": samples}, path)
    good, bad, _ = read(path, rewards=["reward.acc"])
    assert bad == [BadRow(f"{path}, row 2", "its status is aborted")]
    assert good == [
        InspectedResponse(
            place=f"{path}, row 1", prompt="a b", response="cde", reward=1.0,
            group=good[0].group, table=str(path), step=7, prompt_ids=(1, 2), response_ids=(3, 4, 5),
            is_sampled=(True, False, True), logprobs=(-0.1, 0.0, -0.3), is_truncated=True,
            answer="7",
        )
    ]  # fmt: skip
    _, bad, _ = read(path)
    assert "reward is {'acc': 1.0, 'len': 0.2}, not a finite number" in bad[0].reason


def test_slime_s_training_data_has_values(tmp_path: Path) -> None:
    sample = {
        "tokens": torch.tensor([1, 2, 3, 4]), "response_lengths": 2, "rewards": 0.5,
        "rollout_position": 1, "values": torch.tensor([0.25, 0.5]),
        "advantages": torch.tensor([0.75, 0.5]), "returns": torch.tensor([1.0, 1.0]),
        "log_probs": torch.tensor([-0.5, -0.25]), "truncated": 0,
    }  # fmt: skip
    torch.save(
        {"format_version": 2, "rollout_id": 2, "samples": [sample], "raw_reward": [0.0, 1.0]},
        tmp_path / "train_2.pt",
    )
    (one,), bad, _ = read(tmp_path)
    assert bad == []
    assert (one.reward, one.step, one.response_ids) == (1.0, 2, (3, 4))
    assert (one.values, one.advantages, one.returns) == ((0.25, 0.5), (0.75, 0.5), (1.0, 1.0))
    assert (one.prompt, one.response) == ("tokens 1 2", "tokens 3 4")


def test_slime_s_training_data_of_older_versions(tmp_path: Path) -> None:
    """A file for each rank has a list for each column, and the raw rewards of all ranks."""
    for rank, samples in enumerate([(0, 2), (0, 2), (1, 3)]):  # the first two share their samples
        columns: dict[str, Any] = {
            "tokens": [torch.tensor([1, 2, 3, 4 + number]) for number in samples],
            "response_lengths": [2, 2], "total_lengths": [4, 4], "truncated": [0, 1],
            "rewards": [float(number) for number in samples], "raw_reward": [9.0] * 4,
            "loss_masks": [torch.tensor([1, 1])] * 2, "sample_indices": list(samples),
            "values": [torch.tensor([0.25, 0.5])] * 2, "returns": [torch.tensor([1.0, 1.0])] * 2,
        }  # fmt: skip
        torch.save(
            {"rollout_id": 5, "rank": rank, "rollout_data": columns},
            tmp_path / f"train_5_{rank}.pt",
        )
    good, bad, notes = read(tmp_path)
    assert bad == []
    assert [one.reward for one in good] == [0.0, 2.0, 1.0, 3.0]
    assert {(one.step, one.table, one.group) for one in good} == {(5, str(tmp_path), good[0].group)}
    assert [one.is_truncated for one in good] == [False, True] * 2
    assert good[2].response_ids == (3, 5)
    assert good[2].values == (0.25, 0.5)
    assert "2 samples are those of another of slime's ranks" in notes


def test_a_pickle_that_would_run_code_is_refused(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "ran",))

    torch.save({"samples": [Runs()]}, tmp_path / "x.pt")
    with pytest.raises(UserError, match="Only tensors, numbers, texts, lists and dicts are read"):
        list(ResponseReader(tmp_path / "x.pt"))
    assert not (tmp_path / "ran").exists()


def test_nemo_rl(tmp_path: Path) -> None:
    """Every column of a line is a batch of one, of the padded sequence."""
    row = {
        "content": [["what?", "that"]], "rewards": [1.0], "input_lengths": [4],
        "token_ids": [[1, 2, 3, 4, 0]], "token_loss_mask": [[0, 0, 1, 1, 0]],
        "advantages": [[0.0, 0.0, 0.5, 0.5, 0.0]],
        "generation_logprobs": [[0.0, 0.0, -0.1, -0.2, 0.0]], "idx": 0,
    }  # fmt: skip
    path = lines(tmp_path / "train_data_step3.jsonl", [row, row | {"token_loss_mask": [[0] * 5]}])
    (one,), bad, _ = read(path)
    assert bad[0].reason == "token_loss_mask marks no token of a response"
    assert (one.prompt, one.response, one.reward, one.step) == ("what?", "that", 1.0, 3)
    assert (one.prompt_ids, one.response_ids) == ((1, 2), (3, 4))
    assert (one.logprobs, one.advantages) == ((-0.1, -0.2), (0.5, 0.5))


def test_openrlhf(tmp_path: Path) -> None:
    row = {"input": "a", "output": "b", "reward": 0.25}
    (one,), _, notes = read(lines(tmp_path / "out.jsonl", [row]))
    assert (one.prompt, one.response, one.reward) == ("a", "b", 0.25)
    assert "OpenRLHF's scored responses" in notes
