"""The folders that a config's critic starts from. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from vapo.config import FitConfig
from vapo.errors import UserError


def critic_start(config: FitConfig) -> str:
    """Return the folder that the critic starts from. It may contain a folder for each critic."""
    init = config.critic.init
    if init == "reward_model":
        assert config.critic.reward_model_path is not None
        return config.critic.reward_model_path
    return config.actor.path if init == "policy" else init


def critic_start_key(config: FitConfig) -> str:
    """Return the config key that names the folder that the critic starts from."""
    keys = {"reward_model": "critic.reward_model_path", "policy": "actor.path"}
    return keys.get(config.critic.init, "critic.init")


def critic_path(config: FitConfig, member: int = 0) -> str:
    """Return the model folder that one of the run's critics starts from.

    `member` is the critic's number. All critics start from one model folder. If value pretraining
    has saved several critics, each starts from its own folder in there.

    Raises: UserError: the saved folder has another number of critics than critic.count.
    """
    start, count = critic_start(config), config.critic.count
    folder = Path(start).expanduser()
    if (folder / "config.json").is_file() or not (folder / "0/config.json").is_file():
        return start
    num_saved = sum(1 for _ in folder.glob("[0-9]*/config.json"))
    if num_saved != count:
        raise UserError(
            f"{start}: the folder has {num_saved} critics, and critic.count is {count}: set "
            f"critic.count={num_saved}, or start from one of them, as {folder / '0'}"
        )
    return str(folder / str(member))
