"""The `vapo` command. Light to import: commands load torch only once the config is valid."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from vapo import __version__
from vapo.arguments import (
    Parser,
    did_you_mean,
    parse_pairs,
    parse_plain,
    parse_seeds,
    positive,
    split_overrides,
)
from vapo.errors import UserError


@dataclass(frozen=True)
class Command:
    """A command with a config: its module in `vapo.commands`, and its schema in `vapo.config`."""

    module: str
    schema: str
    example: str
    doc: str
    resumes: bool = False


CONFIGURED = {
    "fit": Command("fit", "FitConfig", "conf/vapo.yaml", "train a policy", resumes=True),
    "validate": Command(
        "validate", "FitConfig", "conf/vapo.yaml", "score a policy on held-out prompts", True
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
}
PLAIN = {
    "sweep": "run a grid of configs and seeds, as the paper's ablation table",
    "report": "table and figures of a sweep, or of any recorded runs",
    "export": "write the actor or critic of a checkpoint as a Hugging Face folder",
    "ui": "open the MLflow UI on recorded runs",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. Only errors that are not the user's have tracebacks."""
    try:
        _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except UserError as error:
        print(f"vapo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("vapo: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as in `vapo fit --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def _dispatch(argv: list[str]) -> None:
    if not argv or argv[0] in ("-h", "--help"):
        print(_overview())
        return
    name, rest = argv[0], argv[1:]
    if name == "--version":
        print(f"vapo {__version__}")
    elif name in CONFIGURED:
        _configured(name, rest)
    elif name == "sweep":
        _sweep(rest)
    elif name == "report":
        _report(rest)
    elif name == "export":
        _export(rest)
    elif name == "ui":
        _ui(rest)
    else:
        hint = did_you_mean(name, [*CONFIGURED, *PLAIN, "--help", "--version"])
        raise UserError(f"unknown command '{name}'{hint or '; see `vapo --help`'}")


def _overview() -> str:
    docs = {**{name: command.doc for name, command in CONFIGURED.items()}, **PLAIN}
    width = max(map(len, docs))
    return "\n".join(
        [
            "usage: vapo COMMAND ...",
            "",
            "VAPO (arXiv 2504.05118): value-based reinforcement learning for reasoning models.",
            "",
            "commands:",
            *(f"  {name:<{width}}  {doc}" for name, doc in docs.items()),
            "",
            "`vapo COMMAND --help` lists a command's options; `vapo fit --help` every config key.",
            "Start with: vapo fit --config conf/vapo.yaml",
        ]
    )


def _configured(name: str, argv: list[str]) -> None:
    """fit, validate, sft, reward-model: config files and dotted overrides."""
    import vapo.config
    from vapo.config.loading import compose, to_yaml
    from vapo.config.options import describe

    command = CONFIGURED[name]
    schema = getattr(vapo.config, command.schema)
    entries = describe(schema)
    parser = _make_parser(name, command)
    if "-h" in argv or "--help" in argv:
        from vapo.config.help import describe_keys

        print(f"{parser.format_help()}\n{describe_keys(entries)}")
        return
    arguments, overrides = split_overrides(argv, parser, entries)
    options = parser.parse_args(arguments)
    if not options.config:
        raise UserError(f"vapo {name} needs --config FILE, for example --config {command.example}")
    composed = compose(schema, [Path(file) for file in options.config], overrides)
    if options.print_config:
        print(to_yaml(composed.tree), end="")
        return
    run = _load_command(command.module)
    if command.resumes:
        run(composed.config, ckpt_path=options.ckpt_path)
    elif name == "estimate":
        run(
            composed.config,
            gpu_memory_gib=options.gpu_memory_gib,
            model_config=options.model_config,
        )
    else:
        run(composed.config)


def _make_parser(name: str, command: Command) -> Parser:
    parser = Parser(
        prog=f"vapo {name}",
        usage=f"vapo {name} --config FILE [--config FILE ...] [KEY=VALUE ...] [options]",
        description=f"{command.doc[0].upper()}{command.doc[1:]}.\n\n"
        "Config files are merged in order, then the overrides; the last wins. An override is\n"
        "written KEY=VALUE, --KEY=VALUE or --KEY VALUE, with a dotted KEY of the list below.",
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
    if command.resumes:
        does = "resume from" if name == "fit" else "score the actor of"
        parser.add_argument(
            "--ckpt_path",
            "--ckpt-path",
            metavar="last|best|PATH",
            help=f"{does} a checkpoint; last and best: of the newest run in output_dir",
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
    return parser


def _sweep(argv: list[str]) -> None:
    from vapo.config import FitConfig
    from vapo.config.options import describe

    parser = _sweep_parser()
    if "-h" in argv or "--help" in argv:
        print(parser.format_help(), end="")
        return
    arguments, overrides = split_overrides(argv, parser, describe(FitConfig))
    options = parser.parse_args(arguments)
    for flag, example in (("config", "conf/vapo.yaml"), ("grid", "conf/sweep/ablation.yaml")):
        if not getattr(options, flag):
            raise UserError(f"vapo sweep needs --{flag} FILE, for example --{flag} {example}")
    from vapo.commands.sweep import SweepOptions

    _load_command("sweep")(
        SweepOptions(
            files=[Path(file) for file in options.config],
            grid=Path(options.grid),
            seeds=parse_seeds(options.seeds),
            overrides=overrides,
            jobs=options.jobs,
            dry_run=options.dry_run,
            launcher=options.launcher,
            slurm=parse_pairs("--slurm", options.slurm or []),
            sweep_dir=None if options.sweep_dir is None else Path(options.sweep_dir),
            report=not options.no_report,
        )
    )


def _sweep_parser() -> Parser:
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


def _report(argv: list[str]) -> None:
    parser = Parser(prog="vapo report", description=PLAIN["report"].capitalize() + ".")
    chosen = parser.add_mutually_exclusive_group(required=True)
    chosen.add_argument("--sweep", metavar="PARENT_RUN_ID", help="a sweep; also written there")
    chosen.add_argument("--runs", metavar="ID,ID", help="any runs, by id")
    chosen.add_argument("--experiment", metavar="NAME", help="every finished run of an experiment")
    parser.add_argument("--tracking_uri", "--tracking-uri", default="mlruns", metavar="URI")
    parser.add_argument("--output_dir", "--output-dir", default="runs/report", metavar="DIR")
    parser.add_argument(
        "--full_system", "--full-system", metavar="ROW", help="the row to compare with"
    )
    options = parse_plain(parser, argv)
    if options is None:
        return
    from vapo.commands.report import ReportOptions

    _load_command("report")(
        ReportOptions(
            sweep=options.sweep,
            runs=[part for part in (options.runs or "").split(",") if part],
            experiment=options.experiment,
            tracking_uri=options.tracking_uri,
            output_dir=Path(options.output_dir),
            full_system=options.full_system,
        )
    )


def _export(argv: list[str]) -> None:
    parser = Parser(prog="vapo export", description=PLAIN["export"].capitalize() + ".")
    parser.add_argument(
        "checkpoint", metavar="CHECKPOINT", type=Path, help="a .ckpt file or folder"
    )
    parser.add_argument("output_dir", metavar="OUTPUT_DIR", type=Path, help="folder to write")
    parser.add_argument(
        "--network", choices=["actor", "critic"], default="actor", help="default: actor"
    )
    options = parse_plain(parser, argv)
    if options is not None:
        _load_command("export")(options.checkpoint, options.output_dir, options.network)


def _ui(argv: list[str]) -> None:
    parser = Parser(prog="vapo ui", description=PLAIN["ui"] + ".")
    parser.add_argument("--tracking_uri", "--tracking-uri", default="mlruns", metavar="URI")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5000)
    options = parse_plain(parser, argv)
    if options is not None:
        _load_command("ui")(options.tracking_uri, options.host, options.port)


def _load_command(module: str) -> Callable[..., object]:
    run: Callable[..., object] = importlib.import_module(f"vapo.commands.{module}").run
    return run
