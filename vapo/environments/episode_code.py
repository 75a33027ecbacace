"""The code of an environment: imported in a host process, and run in one process per episode."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from vapo.errors import UserError
from vapo.errors.shown_text import beginning
from vapo.user_code.handed_functions import function_of
from vapo.user_code.process_protocol import UserCode, printable, reward_of, reward_problem
from vapo.user_code.user_functions import check_arguments

KEY = "environment.function"

_METHODS = {"reset": "row", "step": "text"}


def user_class(
    path: str,
    args: Mapping[str, Any],
    *,
    folder: str | None = None,
    class_bytes: bytes | None = None,
) -> MakeEpisode:
    """Import a user's environment class, and return a function that makes an instance.

    Each episode has an instance of its own.

    Raises: UserError: the class cannot be imported, lacks a method, or does not take
        `environment.args`.
    """
    class_ = function_of(path, class_bytes, key=KEY, folder=folder)
    for name, argument in _METHODS.items() if isinstance(class_, type) else ():
        method = getattr(class_, name, None)
        if not callable(method):
            raise UserError(
                f"{KEY}: {path} has no method {name}({argument}); an environment has reset(row) "
                "and step(text): see docs/environments.md"
            )
        check_arguments(method, f"{KEY}: {path}.{name}", "self", argument)
    arguments = dict.fromkeys(args, "...")
    check_arguments(class_, f"{KEY}: {path} with environment.args", **arguments)
    return functools.partial(class_, **args)


MAX_OBSERVATION_CHARS = 2**18
"""A longer observation makes its episode fail: a policy cannot read it."""


class UserEpisode(Protocol):
    """The interface of an environment's object for one episode. It may also have `close()`.

    `reset` returns the first observation; `step` returns the next one, or None at the end, and a
    reward.
    """

    def reset(self, row: dict[str, Any]) -> str | None: ...

    def step(self, text: str) -> tuple[str | None, float]: ...


MakeEpisode = Callable[[], UserEpisode]


class EpisodeAnswers:
    """Answers the questions of one episode: `("reset", row)`, then each `("step", text)`.

    It is the `Answering` of the episode's process.

    Args:
        make: makes the environment's object for this episode. It is called at `reset`.
    """

    def __init__(self, make: MakeEpisode) -> None:
        self._make = make
        self._episode: Any = None

    def __call__(self, question: tuple[str, Any]) -> dict[str, Any]:
        method, argument = question
        if method == "step":
            return _checked(self._episode.step(argument))
        seed = argument.get("seed")
        _seed(seed if isinstance(seed, int) else 0)
        self._episode = self._make()
        return _checked((self._episode.reset(argument) or "", 0.0))

    def close(self) -> None:
        """Call the environment object's own `close()`, if it has one."""
        if callable(close := getattr(self._episode, "close", None)):
            close()


def _seed(seed: int) -> None:
    """Seed the random generators of Python, and of numpy if it is loaded.

    Otherwise every forked process would begin with its host's state.
    """
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _checked(answer: Any) -> dict[str, Any]:
    """Return the fields of an answer `(observation, reward)`; a `failure` for other forms."""
    if not isinstance(answer, (tuple, list)) or len(answer) != 2:
        problem: str | None = (
            "step(text) must return (observation or None, reward), it returned "
            f"{beginning(repr(answer), 80)}"
        )
        return {"failure": f"error: {problem}"}
    observation, reward = answer
    if observation is not None and not isinstance(observation, str):
        problem = f"an observation is text, this is {type(observation).__name__}"
    elif observation is not None and len(observation) > MAX_OBSERVATION_CHARS:
        problem = (
            f"an observation of {len(observation)} characters; at most {MAX_OBSERVATION_CHARS} are "
            "taken"
        )
    elif isinstance(reward, (str, bytes)):
        problem = f"a reward is a finite number, this is {beginning(repr(reward), 80)}"
    else:
        reward = float(reward)
        problem = reward_problem(reward)
    if problem is not None:
        return {"failure": f"error: {problem}"}
    return {"observation": observation, "reward": reward}


@dataclass(frozen=True, kw_only=True)
class EpisodeCode(UserCode):
    """An environment for a host process: a user's class, or one of the package verifiers."""

    kind: str
    name: str
    """The class, as `package.module:Class` or `folder/file.py:Class`; or an environment's id."""
    args: Mapping[str, Any] = field(default_factory=dict)
    function_folder: str | None = None
    function_bytes: bytes | None = None
    """A class of the trainer's own notebook or script (`vapo.user_code.handed_functions`)."""
    max_answer_bytes: int = 12 * MAX_OBSERVATION_CHARS + 4096  # JSON: up to 12 for a character

    @property
    def what(self) -> str:
        return f"environment {self.name}"

    def imported(self) -> Callable[[], EpisodeAnswers]:
        """Import the environment; return a function that makes a process's `EpisodeAnswers`."""
        if self.kind == "function":
            make = user_class(
                self.name, self.args, folder=self.function_folder, class_bytes=self.function_bytes
            )
        else:
            from vapo.environments.verifiers_episode import VerifiersEpisode
            from vapo.environments.verifiers_package import load_environment

            environment = load_environment(self.name, self.args, key="environment.id")
            make = functools.partial(VerifiersEpisode, environment)
        return functools.partial(EpisodeAnswers, make)

    def checked(self, question: Any, fields: dict[str, Any]) -> dict[str, Any] | None:
        """Return an answer's `observation` and `reward`, or None if they are not valid."""
        observation, reward = fields.get("observation"), reward_of(fields.get("reward"))
        if set(fields) != {"observation", "reward"} or reward is None:
            return None
        if observation is None:
            return {"observation": None, "reward": reward}
        if not isinstance(observation, str) or len(observation) > MAX_OBSERVATION_CHARS:
            return None
        return {"observation": printable(observation), "reward": reward}
