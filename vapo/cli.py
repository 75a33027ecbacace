"""The `vapo` command. Light to import: commands load torch only once the config is valid."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from vapo import __version__
from vapo.commands.command_line import (
    Parser,
    did_you_mean,
    parse_pairs,
    parse_plain,
    parse_seeds,
    positive,
    split_overrides,
)
from vapo.commands.command_table import CONFIGURED, PLAIN, make_parser, sweep_parser
from vapo.errors import StoppedRun, StopRequested, UserError
from vapo.system.main_process import is_main_process


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code. Only errors that are not the user's have tracebacks."""
    try:
        _dispatch(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()
    except UserError as error:
        if str(error):
            print(f"vapo: {error}", file=sys.stderr)
        return error.exit_code
    except StopRequested as signalled:
        if is_main_process():
            print(f"vapo: stopped by {signalled}; {signalled.how_to_resume}", file=sys.stderr)
        return signalled.exit_code
    except StoppedRun as stop:
        if is_main_process():
            print(f"vapo: the run stopped: {stop}", file=sys.stderr)
        return stop.exit_code
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
    elif name == "import":
        _import(rest)
    elif name == "ui":
        _ui(rest)
    elif name == "deliver":
        _deliver(rest)
    elif name == "doctor":
        _doctor(rest)
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
    from vapo.config.flattening import to_yaml
    from vapo.config.loading import compose
    from vapo.config.options import describe

    command = CONFIGURED[name]
    schema = getattr(vapo.config, command.schema)
    entries = describe(schema)
    parser = make_parser(name, command)
    if "-h" in argv or "--help" in argv:
        from vapo.config.help import describe_keys

        print(f"{parser.format_help()}\n{describe_keys(entries)}")
        return
    arguments, overrides = split_overrides(argv, parser, entries)
    options = parser.parse_args(arguments)
    if not options.config:
        raise UserError(f"vapo {name} needs --config FILE, for example --config {command.example}")
    if getattr(options, "profile", False):
        overrides.append("trainer.profile=true")
    composed = compose(schema, [Path(file) for file in options.config], overrides)
    if options.print_config:
        print(to_yaml(composed.tree), end="")
        return
    names = (
        *("ckpt_path", "host", "port", "allowed_hosts", "gpu_memory_gib", "model_config"),
        *("num_responses", "output", "value_page"),
    )
    extra = {n: getattr(options, n) for n in names if hasattr(options, n)}
    try:
        _load_command(command.module)(composed.config, **extra)
    except (UserError, StoppedRun) as error:
        error.args = (composed.config.from_environment.redact(str(error)),)
        raise


def _sweep(argv: list[str]) -> None:
    from vapo.config import FitConfig
    from vapo.config.options import describe

    parser = sweep_parser()
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
    parser.add_argument(
        "--policy_steps",
        "--policy-steps",
        type=positive,
        metavar="N",
        help="the table at the last evaluation within N optimizer steps of the policy",
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
            policy_steps=options.policy_steps,
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


def _import(argv: list[str]) -> None:
    parser = Parser(
        prog="vapo import",
        description=PLAIN["import"].capitalize() + ".",
        epilog="SOURCE is a model folder, a hub id, a .gguf file, or package:NAME for the .gguf "
        "file in\nan installed Python package. GGUF needs: pip install 'vapo[gguf]'.",
    )
    parser.add_argument("source", metavar="SOURCE", help="see below")
    parser.add_argument("output_dir", metavar="OUTPUT_DIR", type=Path, help="folder to write")
    parser.add_argument(
        "--dtype",
        choices=["auto", "float32", "bfloat16"],
        default="auto",
        help="of the saved weights; default: auto, the source's (float32 of GGUF and float16)",
    )
    options = parse_plain(parser, argv)
    if options is not None:
        _load_command("import_model")(options.source, options.output_dir, options.dtype)


def _ui(argv: list[str]) -> None:
    parser = Parser(prog="vapo ui", description=PLAIN["ui"] + ".")
    parser.add_argument("--tracking_uri", "--tracking-uri", default="mlruns", metavar="URI")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=5000)
    options = parse_plain(parser, argv)
    if options is not None:
        _load_command("ui")(options.tracking_uri, options.host, options.port)


def _deliver(argv: list[str]) -> None:
    parser = Parser(prog="vapo deliver", description=PLAIN["deliver"].capitalize() + ".")
    parser.add_argument("run_dirs", metavar="RUN_DIR", type=Path, nargs="+", help="a run's folder")
    parser.add_argument(
        "--tracking_uri",
        "--tracking-uri",
        metavar="URI",
        help="default: where the run was recorded; needed where that has a password",
    )
    parser.add_argument("--list", action="store_true", help="say what is left, send nothing")
    options = parse_plain(parser, argv)
    if options is not None:
        _load_command("deliver")(
            options.run_dirs, tracking_uri=options.tracking_uri, only_list=options.list
        )


def _doctor(argv: list[str]) -> None:
    parser = Parser(prog="vapo doctor", description=PLAIN["doctor"].capitalize() + ".")
    parser.add_argument(
        "--engine", choices=["transformers", "vllm"], default="transformers", help="must work"
    )
    options = parse_plain(parser, argv)
    if options is not None:
        _load_command("doctor")(options.engine)


def _load_command(module: str) -> Callable[..., object]:
    run: Callable[..., object] = importlib.import_module(f"vapo.commands.{module}").run
    return run
