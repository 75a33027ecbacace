"""What other processes can read of a command's variables and arguments has no secret in it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

linux = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc to read")

STARTED = """
import ctypes, os, subprocess, sys
from pathlib import Path
from vapo.user_code.process_memory import overwrite_secrets
seen = lambda pid="self": Path(f"/proc/{pid}/environ").read_bytes()
assert b"word5-of" in seen()
overwrite_secrets()
overwrite_secrets()
assert b"word5" not in seen(), seen()
assert b"PLAIN=as-before" in seen()
assert b"MY_TOKEN=***" in seen()
# this process, its libraries and those that it starts have them as before
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
for name, value in (("MY_TOKEN", "word5-of-mine"), ("PROXY", "http://me:word5-of-you@h"),
                    ("EMPTY_TOKEN", ""), ("PLAIN", "as-before"),
                    ("BYTES_KEY", os.fsdecode(b"word5-of\\xff"))):
    assert os.environ[name] == value, name
    assert getenv(name.encode()) == os.fsencode(value), name
child = subprocess.run([sys.executable, "-c", "import os; print(os.environ['MY_TOKEN'])"],
                       capture_output=True, text=True)
assert child.stdout == "word5-of-mine\\n"
os.environ["MY_TOKEN"] = "word5-another"
del os.environ["PROXY"]
assert getenv(b"MY_TOKEN") == b"word5-another"
assert getenv(b"PROXY") is None
arguments = Path("/proc/self/cmdline").read_bytes().split(b"\\0")
shown = [b"uri=http://me:************@h", b"key=1", b"http://h/?sig=****"]
assert arguments[-4:-1] == shown, arguments
assert sys.argv[1:] == ["uri=http://me:word5%2F-arg@h", "key=1", "http://h/?sig=abcd"]
print("done")
"""


@linux
def test_secrets_are_overwritten_and_everybody_who_needs_them_has_them() -> None:
    variables = {
        **os.environ,
        "MY_TOKEN": "word5-of-mine",
        "PROXY": "http://me:word5-of-you@h",
        "EMPTY_TOKEN": "",
        "PLAIN": "as-before",
        "BYTES_KEY": os.fsdecode(b"word5-of\xff"),
    }
    arguments = ["uri=http://me:word5%2F-arg@h", "key=1", "http://h/?sig=abcd"]
    done = subprocess.run(
        [sys.executable, "-c", STARTED, *arguments], env=variables, capture_output=True, text=True
    )
    assert done.stdout == "done\n", done.stderr


COMMAND = """
import sys
from vapo import cli
from vapo.rewards.verifier_code import VerifierCode
from vapo.user_code.credentials import secret_texts_of_code
from vapo.user_code.user_processes import UserProcesses

def judged(argv):
    hidden = secret_texts_of_code(())
    code = VerifierCode(kind="python", function="spying.py:spy", hidden=hidden)
    processes = UserProcesses(code, timeout_s=20, output=None, may_close=False)
    processes.open("a")
    processes.ask("a", ("text", "answer", {}))
    [answer] = processes.poll(20)
    print(answer.fields)
    processes.close()

cli._dispatch = judged
sys.exit(cli.main([]))
"""
SPY = """
import gc, os
from pathlib import Path

def spy(response_text, answer, metadata):
    pid, places = os.getpid(), 0
    shown = repr(dict(os.environ)).encode()
    while pid > 0:  # the process, its host and supervisor, the command, and all above it
        try:
            shown += Path(f"/proc/{pid}/environ").read_bytes()
            shown += Path(f"/proc/{pid}/cmdline").read_bytes()
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        places += 1
    searched = "".join(["word5", "-of"])
    held = [o for o in gc.get_objects() if isinstance(o, (tuple, list))]
    held = [text for o in held for text in o if isinstance(text, str) and searched in text]
    raise ValueError(f"{places > 3}, {searched.encode() in shown}, {held}")
"""


@linux
def test_a_user_s_function_reads_no_secret_of_the_processes_above_it(tmp_path: Path) -> None:
    (tmp_path / "spying.py").write_text(SPY)
    secrets = [
        "MY_TOKEN",
        "PGPASSWORD",
        "DB_PASS",
        "OPENAI_API_KEYS",
        "SSHPASS",
        "A_JWT",
        "A_COOKIE",
    ]
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, "tracking.uri=http://me:word5-of-me@host"],
        env={**os.environ, **dict.fromkeys(secrets, "word5-of-mine"), "URL": "x://a:word5-of@h"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "ValueError: True, False, []" in done.stdout, done.stdout + done.stderr
