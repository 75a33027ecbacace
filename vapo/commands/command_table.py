"""Every command: its options, its help, and what it runs. Light to import."""

from __future__ import annotations

from argparse import SUPPRESS
from pathlib import Path

from vapo.commands.command_line import (
    FILES,
    SWITCH,
    Command,
    configured,
    folder_name,
    key_and_value,
    option,
    positive,
    seeds,
)

_NETWORKS = ("torch", "transformers")
_TRAINER = (*_NETWORKS, "torchmetrics", "lightning")
_EXIT_CODES = """exit codes:
  0    finished
  1    an error of our own, with a traceback
  2    a mistake in config, data or environment, said in one line
  3    ended by a watcher or by too many bad updates (docs/watching.md)
  75   stopped by its surroundings (full disk, lost process): the same command may resume it later
  130  stopped by Ctrl-C; 129 by SIGHUP, 138 by SIGUSR1, 143 by SIGTERM: --ckpt_path last resumes it
See docs/resuming.md.
"""
_ESTIMATE_CODES = """exit codes:
  0    the memory is enough, or --gpu_memory_gib was not given
  2    a mistake in options, config or model
  4    the config does not fit into --gpu_memory_gib; what would let it fit is printed
"""
_CHECKPOINT = (
    "a checkpoint; last and best: of the run whose config.yaml --config names, else of the newest "
    "in output_dir"
)
_STORE = option("--tracking_uri URI", "where runs are recorded, as a folder", default="mlruns")
_HOST = option("--host", "address to listen on", default="127.0.0.1")
_NEW_FOLDER = option("output_dir OUTPUT_DIR", "folder to write", type=Path)
_OWN_DATA = (
    option("--data FILE", "a .jsonl or .parquet file, or a folder or hub id of `datasets`"),
    option("--reward REWARD", "a verifier's name, or your function as FILE.py:FUNCTION"),
)
_OWN_MODEL = (
    option(
        "--model MODEL",
        "a model's folder or hub id, instead of --config and with the next two options: a base "
        "config is chosen for it (docs/first_steps.md)",
    ),
    *_OWN_DATA,
)
COMMANDS = {
    "init": Command(
        "init", "write the default config, its models, recipes and grids into a folder",
        (option("folder [FOLDER]", "", type=folder_name, nargs="?", default=Path()),),
    ),
    "fit": configured(
        "fit", "train a policy",
        *_OWN_MODEL,
        option("--quiet", "print warnings and errors alone", **SWITCH),
        option("--profile", "the same as trainer.profile=true", **SWITCH),
        option("--ckpt_path last|best|PATH", f"resume from {_CHECKPOINT}"),
        option(
            "--smoke",
            "try the run before it is started: evaluate, train an iteration of each phase, save, "
            "resume, train one more; print seconds and memory by stage and what the whole run will "
            "take; leave nothing behind (docs/scaling.md)",
            **SWITCH,
        ),
        option("--smoke_until N", SUPPRESS, type=positive),  # how --smoke starts its sessions
        epilog=_EXIT_CODES, loads=_TRAINER,
    ),
    "try": configured(
        "trying", "show prompts, responses and verdicts of a config, without training",
        *_OWN_MODEL,
        option("--num N", "how many training prompts get a response; default: 5", type=positive),
        option(
            "--responses FILE",
            "judge these responses, without a model: a .jsonl file, or text with one in each line "
            "(docs/own_problems.md)", type=Path,
        ),
    ),
    "validate": configured(
        "validate", "score a policy on held-out prompts",
        *_OWN_MODEL,
        option("--ckpt_path last|best|PATH", f"score the actor of {_CHECKPOINT}"),
        option(
            "--value_page FILE",
            "also write a page, as page.html, that shows each token's value by the checkpoint's "
            "critic, or without a checkpoint by the one that critic.init names",
        ),
        option(
            "--value_truth K",
            "also sample K continuations from prefixes, and compare their rewards with that "
            "critic's values (docs/value_truth.md)", type=positive,
        ),
        loads=_NETWORKS,
    ),
    "filter": configured(
        "filter", "write training prompts with their pass rate",
        option("--num_responses K", "responses to each prompt", type=positive, default=8),
        option("--output FILE", "JSONL; default: a name of its own in output_dir"),
        loads=_TRAINER,
    ),
    "rollouts": configured(
        "rollouts", "write scored rollouts, which value pretraining and `vapo critics` read",
        option("--num N", "rollouts, in whole groups", type=positive, default=1024),
        option("--output FILE", "default: a name of its own in output_dir"),
        option(
            "--format", "plain: JSON lines that other programs read (docs/inspect.md)",
            choices=["parquet", "plain"], default="parquet",
        ),
        option(
            "--value_truth K",
            "also sample K responses on from every step (value_truth.segments) of the rollouts, "
            "for components.value_pretraining.targets truth", type=positive,
        ),
        option(
            "--truth_share S", "the share of the groups for --value_truth; default: 1", type=float
        ),
        loads=_TRAINER,
    ),
    "gates": configured(
        "gates", "which effects of the paper's ablation a setting can show, before a sweep",
        option(
            "--answer_now TEXT",
            "text after which the policy answers at once, as ';' on the tasks of conf/. It is "
            "needed to measure the value of a guess",
        ),
        option(
            "--num_iterations N",
            "the most iterations of the critic alone, and of the policy alone",
            type=positive, default=30,
        ),
        option("--output_dir DIR", "default: OUTPUT_DIR/gates", type=Path),
        loads=_TRAINER,
    ),
    "estimate": configured(
        "estimate", "the memory that a config needs in each process (one a GPU)",
        option(
            "--model MODEL",
            "a model's folder or hub id, instead of --config: only its config.json is read, and "
            "--data and --reward may be left out",
        ),
        *_OWN_DATA,
        option(
            "--gpu_memory_gib N",
            "say whether this memory is enough, and what lets the config fit if it is not; with "
            "--model, choose the config for it", type=float
        ),
        option(
            "--model_config FILE",
            "a model's config.json to count actor and critic by, instead of the config's own",
            type=Path,
        ),
        option(
            "--sustained_tflops N", "what a GPU computes, for the hours and the simulated step",
            type=float,
        ),
        option("--sampled_tokens_per_s N", "what a GPU samples, for the hours", type=float),
        option("--mean_response_tokens N", "mean length of responses, for the hours", type=float),
        option(
            "--mean_prompt_tokens N",
            "mean length of prompts, for the hours; default: data.max_prompt_tokens", type=float,
        ),
        option(
            "--simulate_ranks N",
            "also run a training step on fake tensors, as one of N GPUs (minutes for 32B)",
            type=int,
        ),
        option(
            "--interconnect_gb_s N",
            "what a GPU sends, for the simulated step's time (needs --sustained_tflops)",
            type=float,
        ),
        epilog=_ESTIMATE_CODES, loads=_NETWORKS, model_is_enough=True,
    ),
    "sft": configured(
        "sft", "train on demonstrations",
        schema="SftConfig", example="conf/state_tracking/sft.yaml",
        loads=_TRAINER,
    ),
    "reward-model": configured(
        "reward_model", "train a reward model, the critic's start",
        schema="RewardModelConfig", example="conf/state_tracking/reward_model.yaml",
        loads=_TRAINER,
    ),
    "serve": configured(
        "serve", "start vLLM's server as a trainer of this config needs it",
        _HOST,
        option("--port", "", type=int, default=8100),
        option("--print_command", "print the command, and stop", **SWITCH),
        loads=_NETWORKS,
    ),
    "sweep": Command(
        "sweep", "run a grid of configs and seeds, as the paper's ablation table",
        (
            option("--config FILE", "YAML file of the base config; may be repeated", **FILES),
            option("--grid FILE", "the rows, as conf/sweep/ablation.yaml", type=Path),
            option("--seeds 0,1,2", "default: 0", type=seeds, default=[0]),
            option(
                "--rows NAME,NAME", "only these rows of the grid; may be repeated",
                action="append", default=[],
            ),
            option("--jobs N", "runs at a time; default: 1, on a cluster all", type=positive),
            option(
                "--dry_run",
                "print the plan with its budget, and how long such runs took, and stop", **SWITCH,
            ),
            option("--launcher", "", choices=["local", "slurm"], default="local"),
            option(
                "--slurm KEY=VALUE", "a parameter of submitit; may be repeated",
                action="append", type=key_and_value, default=[],
            ),
            option("--sweep_dir DIR", "default: OUTPUT_DIR/sweep_GRID", type=Path),
            option("--no_report", "write no table and figures", **SWITCH),
        ),
        schema="FitConfig",
        composes_rows=True,
        needs=(("config", "conf/vapo.yaml"), ("grid", "conf/sweep/ablation.yaml")),
        more="\n\nEvery row of the grid runs with every seed, each run in a process of its own; "
        "then the table\nand figures are written. Overrides change the base config, below the rows."
        " Finished runs are\nnot run again, interrupted ones resume. See docs/sweeps.md.",
    ),
    "critics": Command(
        "critics", "train every critic of a grid on the same rollouts, and compare them",
        (
            option("--config FILE", "YAML file of the base config; may be repeated", **FILES),
            option("--rollouts FILE", "what `vapo rollouts` wrote", type=Path),
            option("--grid FILE", "the critics, as conf/sweep/critics.yaml", type=Path),
            option(
                "--rows NAME,NAME", "only these rows of the grid; may be repeated",
                action="append", default=[],
            ),
            option(
                "--heldout FILE", "rollouts of other prompts to measure the critics on; default: "
                "components.value_pretraining.heldout_share of --rollouts", type=Path,
            ),
            option("--seeds 0,1,2", "default: 0", type=seeds, default=[0]),
            option(
                "--every_n_iterations N", "measure this often; default: about 20 times in all",
                type=positive,
            ),
            option("--output_dir DIR", "default: OUTPUT_DIR/critics_GRID", type=Path),
        ),
        schema="FitConfig",
        composes_rows=True,
        needs=(
            ("config", "conf/vapo.yaml"),
            ("rollouts", "runs/rollouts.parquet"),
            ("grid", "conf/sweep/critics.yaml"),
        ),
        loads=_TRAINER,
        more="\n\nEvery critic is trained for components.value_pretraining.num_iterations with "
        "every seed, one after\nthe other in this process; table and figure of the held-out "
        "explained variance are written,\nand each critic's values of the held-out rollouts as "
        "values.parquet.\nWhat was trained is not trained again. See "
        "docs/critics.md.",
    ),
    "inspect": Command(
        "inspecting", "say what a critic knows, by the rollouts of whatever framework",
        (
            option(
                "rollouts ROLLOUTS", "files or folders, as docs/inspect.md lists them", type=Path,
                nargs="+",
            ),
            option("--policy MODEL", "the model that sampled them; its tokenizer reads the texts"),
            option(
                "--chat_template_kwargs JSON",
                "variables that its chat template had when messages were prompts, as "
                "'{\"enable_thinking\": false}'",
            ),
            option("--critic MODEL", "a folder of a critic, whose values are computed"),
            option(
                "--value_truth K",
                "also sample K continuations of the policy from prefixes, and compare their "
                "rewards with the values", type=positive,
            ),
            option(
                "--verifier NAME",
                "what judges continuations: math, exact, math_verify, reasoning_gym, "
                "regex:PATTERN or FILE.py:FUNCTION",
            ),
            option(
                "--sampling KEY=VALUE",
                "a config's key for continuations, as rollouts.temperature=0.7 or "
                "rollouts.engine=vllm; may be repeated", action="append", default=[],
            ),
            option("--reward NAME,NAME", "the columns whose sum is the reward; a.b is b of a"),
            option("--gamma G", "the discount of the critic's returns", type=float, default=1.0),
            option(
                "--output FILE",
                "page.html, the figures as summary.json, or rollouts.parquet for `vapo critics`; "
                "may be repeated",
                action="append", type=Path, default=[],
            ),
        ),
        more=" It needs no config, and\nloads torch for --policy and --critic alone.",
    ),
    "report": Command(
        "report", "table and figures of a sweep, or of any recorded runs",
        (
            option(
                "--tracking_uri URI",
                "default: mlruns; of folders, the store that their runs were recorded in",
            ),
            option(
                "--output_dir DIR",
                "default: runs/report; of a sweep's folder, the folder report in it", type=Path,
            ),
            option("--full_system ROW", "the row to compare with; of folders, the first one's"),
            option(
                "--policy_steps N",
                "the table at the last evaluation within N optimizer steps of the policy",
                type=positive,
            ),
        ),
        one_of=(
            option("--sweep PARENT_RUN_ID", "a sweep; also written there"),
            option("--runs ID,ID", "any runs, by id"),
            option("--experiment NAME", "every finished run of an experiment"),
            option(
                "folders FOLDER",
                "folders of runs, as vapo fit prints them; or that of a sweep, whose parent run "
                "gets the report, too", type=Path, nargs="*", default=(),
            ),
        ),
        loads=("scipy.stats", "matplotlib"),
    ),
    "import": Command(
        "import_model", "write a pretrained model as a Hugging Face folder, and check it",
        (
            option("source SOURCE", "see below"),
            _NEW_FOLDER,
            option(
                "--dtype", "of the saved weights; auto: the source's (float32 of GGUF and float16)",
                choices=["auto", "float32", "bfloat16"], default="auto",
            ),
        ),
        epilog="SOURCE is a model folder, a hub id, a .gguf file, or package:NAME for the .gguf "
        "file in\nan installed Python package. GGUF needs the extra 'gguf' (docs/models.md).",
        loads=_NETWORKS,
    ),
    "export": Command(
        "export", "write the actor or critic of a checkpoint as a Hugging Face folder",
        (
            option("checkpoint CHECKPOINT", "a .ckpt file or folder", type=Path),
            _NEW_FOLDER,
            option("--network", "", choices=["actor", "critic"], default="actor"),
        ),
        loads=_NETWORKS,
    ),
    "ui": Command(
        "ui", "open the MLflow UI on recorded runs",
        (
            _STORE,
            _HOST,
            option("--port", "port to listen on", type=int, default=5000),
            option("--run RUN_ID", "print the address of this run's charts"),
        ),
        more=" Ctrl-C ends the server.",
    ),
    "deliver": Command(
        "deliver", "send records that a tracking store did not take while it was away",
        (
            option("run_dirs RUN_DIR", "a run's folder", type=Path, nargs="+"),
            option(
                "--tracking_uri URI",
                "default: where the run was recorded; needed where that has a password, or no "
                "command of yours has used it",
            ),
            option("--list", "say what is left, send nothing", dest="only_list", **SWITCH),
        ),
    ),
    "doctor": Command(
        "doctor", "say which sampling engines work here, and what is missing",
        (
            option(
                "--engine", "must work", choices=["transformers", "vllm"], default="transformers"
            ),
        ),
        loads=("torch",),
    ),
}  # fmt: skip

OTHER_NAMES = {
    **dict.fromkeys(("train", "training", "run", "start", "rl", "grpo", "ppo", "vapo"), "fit"),
    **dict.fromkeys(("eval", "evaluate", "test", "benchmark", "score"), "validate"),
    **dict.fromkeys(("sample", "demo", "chat", "infer", "inference"), "try"),
    **dict.fromkeys(("generate", "rollout", "dump"), "rollouts"),
    **dict.fromkeys(("finetune", "fine-tune", "supervised"), "sft"),
    **dict.fromkeys(("rm", "reward", "reward_model"), "reward-model"),
    **dict.fromkeys(("merge", "save", "convert"), "export"),
    **dict.fromkeys(("resume",), "fit --ckpt_path last"),
    **dict.fromkeys(("tune", "grid", "ablate", "ablation", "search"), "sweep"),
    **dict.fromkeys(("mlflow", "dashboard", "tensorboard", "board"), "ui"),
    **dict.fromkeys(("memory", "plan", "cost"), "estimate"),
    **dict.fromkeys(("check", "env", "info"), "doctor"),
    **dict.fromkeys(("server", "vllm"), "serve"),
}
"""A command's name in other programs, as train, -> the command that does it here, as fit."""
