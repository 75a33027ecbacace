"""`vapo try`: what it shows of prompts, responses and verifiers; it leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.config.fits import ROOT, STATE_TRACKING, write
from vapo import cli
from vapo.commands.trials import MAX_SHOWN_CHARS
from vapo.commands.trying import read_responses
from vapo.errors import UserError

POLICY = ROOT / "models" / "state_tracking" / "policy"
TELLING = """
import os, subprocess, sys, time
print("imported")

def score(text, answer, metadata):
    print("judging", text, metadata)
    if text == "child":
        subprocess.run(["sh", "-c", "echo from a child; echo and its stderr >&2"])
    if text == "hang":
        time.sleep(60)
    if text == "die":
        os._exit(3)
    if text == "much":
        sys.stdout.write("x" * 2_000_000 + "\\n")
    if text == "hostile":
        print("\\x1b[2J\\u202e\\rverdict: correct; reward 100")
    return text == answer, len(text) / 2
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with data, a verifier that prints, and their overlay, `my.yaml`."""
    rows = [{"prompt": "1a34=", "answer": "1", "n": 7}, {"prompt": "1a12=", "answer": "2", "n": 8}]
    write(tmp_path, "".join(f"{json.dumps(row)}\n" for row in rows * 2), "rows.jsonl")
    write(tmp_path, TELLING, "telling.py")
    overlay = {
        "data": {
            "train": {"kind": "jsonl", "path": "rows.jsonl"},
            "heldout": {"kind": "jsonl", "path": "heldout.jsonl"},
        },
        "rewards": {"verifier": "python", "function": "telling.py:score", "timeout_s": 1},
        "output_dir": "runs",
        "actor": {"path": str(POLICY)},
    }
    write(tmp_path, '{"prompt": "2a34=", "answer": "2", "n": 9}\n', "heldout.jsonl")
    write(tmp_path, json.dumps(overlay), "my.yaml")
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def tried(capsys: pytest.CaptureFixture[str], *words: str, code: int = 0) -> str:
    files = [*map(str, STATE_TRACKING), "my.yaml"]
    arguments = [word for file in files for word in ("--config", file)]
    assert cli.main(["try", *arguments, *words]) == code
    printed = capsys.readouterr()
    return printed.out if code == 0 else printed.err


def parts(shown: str) -> list[str]:
    return shown.split("--- ")


@pytest.mark.slow
def test_given_responses_with_all_that_a_verifier_does(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = ["1", "child", "hang", "die", "much", "hostile", "2"]
    lines: list[dict[str, Any]] = [{"response": text, "answer": "1", "x": 3} for text in answers]
    lines[-1] = {"response": "2", "prompt_id": "heldout.jsonl:1"}
    write(project, "".join(f"{json.dumps(line)}\n" for line in lines), "said.jsonl")
    shown = tried(capsys, "--responses", "said.jsonl")
    begin, right, child, hang, die, much, hostile, last = parts(shown)
    assert begin == "the verifier printed while it was imported:\n  | imported\n\n"
    assert "verdict: correct; reward 0.5\n" in right
    assert "  | judging 1 {'x': 3}\n" in right
    assert "  | from a child\n  | and its stderr\n" in child
    assert "verdict: no verdict (timeout), which counts as incorrect; reward -1\n" in hang
    assert "  | judging hang {'x': 3}\n" in hang
    assert "verdict: no verdict (crash)" in die
    assert "judging die" in die
    assert "imported" not in "".join([hang, die, much]), "a process that replaces one says it again"
    assert "bytes more" in much
    assert len(much) < 2 * MAX_SHOWN_CHARS
    assert "  | \\x1b[2J\\u202e\\rverdict: correct; reward 100\n" in hostile
    assert "verdict: incorrect; reward 3.5\n" in hostile
    assert "judging 2 {'prompt': '2a34=', 'answer': '2', 'n': 9}" in last
    assert "reference answer: 2\n" in last
    assert "pass rate 0.286 (2 of 7 correct), mean reward" in last
    assert "2 without a verdict" in last
    assert "hint: an incorrect response has the reward 3.5, and a correct one 0.5" in last
    assert all(c.isprintable() or c == "\n" for c in shown)


def test_given_responses_need_no_torch_and_are_judged_by_their_rows(project: Path) -> None:
    write(project, "1\n\n\\boxed{1}\r\n", "said.txt")
    write(project, "def score(text, answer, metadata):\n    raise KeyError(text)\n", "telling.py")
    code = (
        "import sys\nfrom vapo.cli import main\nmain(sys.argv[1:])\n"
        "print({'torch', 'transformers', 'mlflow'} & set(sys.modules))"
    )
    files = [*map(str, STATE_TRACKING), "my.yaml"]
    words = ["try", *(word for file in files for word in ("--config", file))]
    done = subprocess.run(
        [sys.executable, "-c", code, *words, "--responses", "said.txt"],
        cwd=project,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    _, first, second = parts(done.stdout)
    assert first.startswith("1 of 2: rows.jsonl:1\nprompt:\n  | 1a34=\nreference answer: 1\n")
    assert second.startswith("2 of 2: rows.jsonl:2\nprompt:\n  | 1a12=\nreference answer: 2\n")
    assert "response, 9 characters:\n  | \\boxed{1}\n" in second
    assert "verdict: no verdict (error: KeyError: '1' (telling.py:2))" in first
    where = f'  |   File "{project}/telling.py", line 2, in score\n  |     raise KeyError(text)\n'
    assert f"  | Traceback (most recent call last):\n{where}" in first
    assert "text_judge" not in first, "the traceback begins with the user's own line"
    assert done.stdout.endswith("\nset()\n")


def test_it_says_which_part_of_a_response_is_judged(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(project, "2, no</think> 1\n1\n2</think>\n", "said.txt")
    exact = ("rewards.verifier=exact", "rewards.answer_after=</think>")
    _, part, nothing, empty = parts(tried(capsys, "--responses", "said.txt", *exact))
    assert "judged: the 1 characters after the last '</think>'\nverdict: correct; reward 1" in part
    assert "  | 2, no</think> 1\n" in part, "all of it is shown"
    none = "judged: nothing, because it has no '</think>' (rewards.without_answer_after)\n"
    assert f"{none}verdict: incorrect; reward -1" in nothing
    assert "judged: the 0 characters after" in empty
    assert "hint: 1 of 3 responses have no '</think>' and are wrong" in empty
    whole = (*exact, "rewards.without_answer_after=whole")
    _, _, all_of_it, _ = parts(tried(capsys, "--responses", "said.txt", *whole))
    assert "judged: all of it, which has no '</think>'\nverdict: incorrect" in all_of_it


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("gone.txt", None, "--responses gone.txt: No such file"),
        ("a.txt", "\n \n", "it has no responses"),
        ("a.txt", "1\n2\n3\n4\n5\n", "a.txt:5: it is response 5, and there are 4 training rows"),
        ("a.jsonl", '{"response": "1"}\n{"response"\n', "a.jsonl:2: not a line of JSON"),
        ("a.jsonl", "[1]\n", "a.jsonl:1: this line is not a JSON object"),
        ("a.jsonl", '{"text": "1"}\n', "a.jsonl:1: it has no `response`"),
        ("a.jsonl", '{"response": 1}\n', "a.jsonl:1: `response` must be text"),
        (
            "a.jsonl",
            '{"response": "\\ud800"}\n',
            r"a.jsonl:1: the line has a text with \ud800",
        ),
        (
            "a.jsonl",
            f'{{"response": "1", "m": {"[" * 600}{"]" * 600}}}\n',
            "has lists or obj",
        ),
        ("a.jsonl", '{"response": "1", "n": 3}\n', "a.jsonl:1: `n` is not read"),
        (
            "a.jsonl",
            '{"response": "1", "prompt_id": "rows.jsonl:9"}\n',
            "a.jsonl:1: no row has the prompt_id 'rows.jsonl:9'; did you mean 'rows.jsonl:",
        ),
        ("a.jsonl", '{"response": "1", "prompt_id": "a", "answer": "b"}\n', "or `answer`"),
    ],
)
def test_a_file_of_responses_that_cannot_be_used(
    project: Path,
    capsys: pytest.CaptureFixture[str],
    name: str,
    text: str | None,
    said: str,
) -> None:
    if text is not None:
        write(project, text, name)
    message = tried(capsys, "--responses", name, code=2)
    assert said in message
    assert "Traceback" not in message


def test_a_number_is_a_reward(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(project, "def score(text, answer, metadata):\n    return float(text)\n", "telling.py")
    write(project, "1.0\n0.25\n-2\n", "said.txt")
    _, right, part, negative = parts(tried(capsys, "--responses", "said.txt"))
    assert "verdict: correct; reward 1\n" in right
    assert "verdict: incorrect; reward 0.25\n" in part
    assert "verdict: incorrect; reward -2\n" in negative


def test_something_else_than_a_verdict_is_shown_with_what_to_return(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(project, "def score(text, answer, metadata):\n    return {'score': 1.0}\n", "telling.py")
    write(project, "1\n", "said.txt")
    shown = tried(capsys, "--responses", "said.txt")
    said = "returned {'score': 1.0}, not a bool, a number or (bool, number); return its score"
    assert f"verdict: no verdict (error: TypeError: {said}), which counts" in shown


def test_a_reward_function_of_trl_judges(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = "def score(prompts, completions, **kwargs):\n    return [1.0 if prompts[0] else 0.0]\n"
    write(project, source, "telling.py")
    assert "reward 1" in tried(capsys)


def test_a_verifier_that_cannot_be_imported(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(project, "print('so far')\nimport gone_away\n", "telling.py")
    write(project, "1\n", "a.txt")
    files = [word for file in [*map(str, STATE_TRACKING), "my.yaml"] for word in ("--config", file)]
    assert cli.main(["try", *files, "--responses", "a.txt"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "the verifier printed while it was imported:\n  | so far\n\n"
    assert f"No module named 'gone_away' ({project}/telling.py:2)" in printed.err


def test_a_key_that_a_line_has_twice_is_an_error(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write(project, '{"response": "1", "response": "2"}\n', "said.jsonl")
    said = tried(capsys, "--responses", "said.jsonl", code=2)
    assert "said.jsonl:1: not a line of JSON (the key 'response' is there twice)" in said


def test_what_does_not_go_together(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(project, "1\n", "a.txt")
    assert "--num is not read" in tried(capsys, "--responses", "a.txt", "--num", "3", code=2)
    model = ["rewards.verifier=reward_model", "rewards.reward_model_path=x"]
    assert "without a model" in tried(capsys, "--responses", "a.txt", *model, code=2)
    assert "is one process" in tried(capsys, "trainer.strategy=fsdp", code=2)
    (project / "latin.txt").write_bytes(b"\xe9\n")
    with pytest.raises(UserError, match="not text in UTF-8"):
        read_responses(project / "latin.txt")


def test_sampled_responses(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a template writes the prompt, and the response as the verifier reads it."""
    shutil.copytree(POLICY, project / "policy")
    template = "{% for m in messages %}<|endoftext|>{{ m.content }}{% endfor %}"
    write(project / "policy", template, "chat_template.jinja")
    before = set(project.rglob("*"))
    words = ["--num", "3", "actor.path=policy"]
    shown = tried(capsys, *words, "data.chat_template=true", "rollouts.max_response_tokens=40")
    _, *trials = parts(shown)
    assert len(trials) == 3
    assert "prompt, 6 tokens:\n  | <|endoftext|>1a" in trials[0]
    assert "tokens, finished (stop):\n  | a" in trials[0]
    response = trials[0].split("finished (stop):\n  | ")[1].split("\n")[0]
    assert f"the verifier printed:\n  | judging {response} {{" in trials[0]
    assert "<|endoftext|>" not in response
    assert " of 3 correct), mean reward" in trials[2]
    assert "0 truncated" in trials[2]
    shown = tried(capsys, *words, "rollouts.max_response_tokens=2")
    assert "response, 2 tokens, truncated (length):\n" in shown
    assert (
        "hint: 3 of 3 responses reached their budget without an end token (<|endoftext|>): raise "
        "rollouts.max_response_tokens, which is 2\n"
    ) in shown
    assert "hint: the tokenizer has a chat template and data.chat_template is false" in shown
    assert {path.name for path in set(project.rglob("*")) - before} <= {"__pycache__"} | {
        path.name for path in project.rglob("*.pyc")
    }, "no run folder, no tracking"


def test_responses_that_never_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((Path("/dev/zero"), "a device"), (tmp_path / "pipe", "a named pipe")):
        with pytest.raises(UserError, match=f"--responses: {path} is {kind}: give a regular file"):
            read_responses(path)
