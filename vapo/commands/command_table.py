"""The commands by name, and the parsers of those with many options. Light to import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from vapo.commands.command_line import Parser, positive


@dataclass(frozen=True)
class Command:
    """A command with a config: its module in `vapo.commands`, and its schema in `vapo.config`."""

    module: str
    schema: str
    example: str
    doc: str
    resumes: bool = False
    serves: bool = False


CONFIGURED = {
    "fit": Command("fit", "FitConfig", "conf/vapo.yaml", "train a policy", resumes=True),
    "validate": Command(
        "validate", "FitConfig", "conf/vapo.yaml", "score a policy on held-out prompts", True
    ),
    "filter": Command(
        "filter", "FitConfig", "conf/vapo.yaml", "write training prompts with their pass rate"
    ),
    "estimate": Command(
        "estimate", "FitConfig", "conf/vapo.yaml", "the memory that a config needs on each GPU"
    ),
    "sft": Command("sft", "SftConfig", "conf/sft_state_tracking.yaml", "train on demonstrations"),
    "reward-model": Command(
        "reward_model",
        "RewardModelConfig",
        "conf/reward_model_state_tracking.yaml",
        "train a reward model, the critic's start",
    ),
    "rollout-server": Command(
        "rollout_server",
        "FitConfig",
        "conf/vapo.yaml",
        "serve a vLLM engine to trainers on other devices",
        serves=True,
    ),
}
PLAIN = {
    "sweep": "run a grid of configs and seeds, as the paper's ablation table",
    "report": "table and figures of a sweep, or of any recorded runs",
    "import": "write a pretrained model as a Hugging Face folder, and check it",
    "export": "write the actor or critic of a checkpoint as a Hugging Face folder",
    "ui": "open the MLflow UI on recorded runs",
    "deliver": "send records that a tracking store did not take while it was away",
    "doctor": "say which sampling engines work here, and what is missing",
}


EXIT_CODES = """exit codes:
  0    finished
  1    an error of our own, with a traceback
  2    a mistake in config, data or environment, said in one line
  3    ended by a watcher or by too many bad updates (docs/watching.md)
  75   stopped by its surroundings (full disk, lost process): the same command may go on later
  130  stopped by Ctrl-C; 138 by SIGUSR1, 143 by SIGTERM: --ckpt_path last goes on
See docs/resuming.md.
"""


def make_parser(name: str, command: Command) -> Parser:
    parser = Parser(
        prog=f"vapo {name}",
        usage=f"vapo {name} --config FILE [--config FILE ...] [KEY=VALUE ...] [options]",
        description=f"{command.doc[0].upper()}{command.doc[1:]}.\n\n"
        "Config files are merged in order, then the overrides; the last wins. An override is\n"
        "written KEY=VALUE, --KEY=VALUE or --KEY VALUE, with a dotted KEY of the list below.",
        epilog=EXIT_CODES if name == "fit" else None,
    )
    parser.add_argument(
        "--config", action="append", metavar="FILE", help=f"YAML file, as {command.example}"
    )
    parser.add_argument(
        "--print_config",
        "--print-config",
        action="store_true",
        help="print the merged config as YAML, interpolations kept, and stop",
    )
    _add_options_of(name, command, parser)
    return parser


def _add_options_of(name: str, command: Command, parser: Parser) -> None:
    """What this command has and others do not."""
    if command.serves:
        parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1")
        parser.add_argument("--port", type=int, default=8100, help="default: 8100; 0: any")
        parser.add_argument(
            "--allowed_host",
            "--allowed-host",
            dest="allowed_hosts",
            action="append",
            default=[],
            metavar="NAME",
            help="another name by which trainers call this host; may be repeated",
        )
    if name == "fit":
        parser.add_argument(
            "--profile", action="store_true", help="the same as trainer.profile=true"
        )
    if command.resumes:
        does = "resume from" if name == "fit" else "score the actor of"
        parser.add_argument(
            "--ckpt_path",
            "--ckpt-path",
            metavar="last|best|PATH",
            help=f"{does} a checkpoint; last and best: of the newest run in output_dir",
        )
    if name == "validate":
        parser.add_argument(
            "--value_page",
            "--value-page",
            metavar="FILE",
            help="also write a page of the responses' tokens by value, as page.html; the critic is "
            "the checkpoint's, else the one that critic.init names",
        )
    if name == "filter":
        parser.add_argument(
            "--num_responses",
            "--num-responses",
            type=positive,
            default=8,
            metavar="K",
            help="responses to each prompt; default: 8",
        )
        parser.add_argument(
            "--output", metavar="FILE", help="JSONL; default: a name of its own in output_dir"
        )
    if name == "estimate":
        parser.add_argument(
            "--gpu_memory_gib", "--gpu-memory-gib", type=float, metavar="N", help="does it fit?"
        )
        parser.add_argument(
            "--model_config",
            "--model-config",
            type=Path,
            metavar="FILE",
            help="a model's config.json to count actor and critic by, instead of the config's own",
        )


def sweep_parser() -> Parser:
    parser = Parser(
        prog="vapo sweep",
        usage="vapo sweep --config FILE --grid FILE [--seeds 0,1,2] [KEY=VALUE ...] [options]",
        description="Run every row of a grid with every seed, each run its own process, and write "
        "the\ntable and figures. Overrides change the base config, below the rows. Runs that have\n"
        "finished are not run again, interrupted ones go on. See docs/sweeps.md.",
    )
    add = parser.add_argument
    add("--config", action="append", metavar="FILE", help="YAML file of the base config")
    add("--grid", metavar="FILE", help="the rows, as conf/sweep/ablation.yaml")
    add("--seeds", default="0", metavar="0,1,2", help="default: 0")
    add("--jobs", type=positive, metavar="N", help="runs at a time; default: 1")
    add("--dry_run", "--dry-run", action="store_true", help="print the rows and stop")
    add("--launcher", choices=["local", "slurm"], default="local", help="default: local")
    add("--slurm", action="append", metavar="KEY=VALUE", help="a parameter of submitit")
    add("--sweep_dir", "--sweep-dir", metavar="DIR", help="default: OUTPUT_DIR/sweep_GRID")
    add("--no_report", "--no-report", action="store_true", help="write no table and figures")
    return parser
