"""Files of other frameworks, written by their own code, for tests/studies/inspection/fixtures.

    python experiments/inspect/make_fixtures.py verl PEERS        # 0.9.1, unpacked
    python experiments/inspect/make_fixtures.py verifiers         # with verifiers 0.4.0 installed
    python experiments/inspect/make_fixtures.py results PEERS     # 0.1.9, unpacked
    python experiments/inspect/make_fixtures.py trl               # with trl 1.16.0 installed
    python experiments/inspect/make_fixtures.py v_head FOLDER     # with trl 1.12.0 installed

PEERS is a folder with the unpacked wheels (`pip download --no-deps verl==0.9.1`). Of verl and of
verifiers 0.1.9 single functions are run as they stand in the wheel, as experiments/bench does:
imported whole they need Ray and a dozen packages more.
"""

from __future__ import annotations

import ast
import json
import shutil
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests/studies/inspection/fixtures"
QUESTIONS = {"What is 2 + 3?": "5", "What is 7 - 4?": "3"}
ANSWERS = ["5", "4", "2 + 3 is 5", "3"]


def function_of(file: Path, name: str, scope: dict[str, Any]) -> Any:
    """A function or method, wherever it stands in the file, without its decorators."""
    definitions = [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    definitions[0].decorator_list = []
    exec(compile(ast.Module([definitions[0]], []), str(file), "exec"), scope)
    return scope[name]


def rows() -> list[tuple[str, str, str, float]]:
    """Question, reference, answer, score: a group of each question."""
    return [(q, a, answer, float(a in answer)) for q, a in QUESTIONS.items() for answer in ANSWERS]


def verl(peers: Path) -> None:
    """Write a training step and a validation with `uid`, by verl's `_write_generations`."""
    import os

    import numpy as np

    folder = peers / "verl/trainer/ppo"
    if not folder.is_dir():
        folder = peers / "verl/verl/trainer/ppo"
    scope = {"os": os, "json": json, "np": np}
    template = "system\nYou are a helpful assistant.\nuser\n{}\nassistant\n"
    columns = list(zip(*rows(), strict=True))
    inputs = [template.format(question) for question in columns[0]]
    for file, step, more in (
        ("ray_trainer.py", 1, {"acc": [score > 0 for score in columns[3]]}),
        ("v1/trainer_base.py", 2, {"uid": [f"q{i // 4}_{i % 4}_0" for i in range(len(inputs))]}),
    ):
        write = function_of(folder / file, "_write_generations", dict(scope))
        arguments = [inputs, list(columns[2]), list(columns[1]), list(columns[3])]
        write(*arguments, more, str(FIXTURES / "verl"), step)


def results(peers: Path) -> None:
    """verifiers 0.1.9: `make_dataset` and its JSON."""
    from datasets import Dataset

    folder = peers / "verifiers01/verifiers/utils"
    scope: dict[str, Any] = {"Dataset": Dataset, "json": json, "GenerateOutputs": dict}
    scope |= {"Messages": Any, "cast": lambda kind, value: value}
    scope["ChatCompletionAssistantMessageParam"] = scope["ChatMessage"] = Any
    for name in ("message_to_printable", "messages_to_printable", "sanitize_tool_calls"):
        function_of(folder / "message_utils.py", name, scope)
    make = function_of(folder / "eval_utils.py", "make_dataset", scope)
    columns = list(zip(*rows(), strict=True))
    timing = {"generation_ms": 1.0, "scoring_ms": 0.0, "total_ms": 1.0}
    dataset = make(
        {
            "example_id": [i // len(ANSWERS) for i in range(len(columns[0]))],
            "prompt": [[{"role": "user", "content": question}] for question in columns[0]],
            "completion": [[{"role": "assistant", "content": answer}] for answer in columns[2]],
            "task": ["sums"] * len(columns[0]),
            "reward": list(columns[3]),
            "answer": list(columns[1]),
            "info": [{}] * len(columns[0]),
            "state": [{"timing": timing}] * len(columns[0]),
            "metrics": {"correct_answer": list(columns[3])},
            "metadata": {"state_columns": []},
        }
    )
    dataset.to_json(FIXTURES / "verifiers_0.1/results.jsonl")


def verifiers() -> None:
    """verifiers 0.4.0: `write_episode`, as its evaluation and prime-rl write traces.jsonl."""
    from verifiers.v1.configs.agent import WireAgentConfig
    from verifiers.v1.episode import Episode, GroupInfo, TrainRunInfo
    from verifiers.v1.graph import MessageNode
    from verifiers.v1.task import WireTaskData
    from verifiers.v1.trace import AgentInfo, ModelCall, Trace, TraceTask
    from verifiers.v1.types import AssistantMessage, ToolMessage, UserMessage
    from verifiers.v1.utils.trace_store import write_episode

    folder = FIXTURES / "verifiers_0.4"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number, (question, reference, answer, score) in enumerate(rows()):
        ids = [100 + ord(c) for c in answer]
        data = WireTaskData(idx=number // 4, prompt=question, answer=reference)
        task = TraceTask(type="Sum", data=data, key=f"sum-{number // 4}")
        trace = Trace(task=task, agent=AgentInfo(config=WireAgentConfig(model="policy")))
        prompt_ids = [1, *(100 + ord(c) for c in question)]
        trace.nodes = [
            MessageNode(
                message=UserMessage(content=question),
                token_ids=prompt_ids,
                mask=[False] * len(prompt_ids),
            ),
            MessageNode(
                parent=0,
                message=AssistantMessage(content=answer),
                sampled=True,
                token_ids=[2, *ids, 3],  # the generation prompt's token comes first
                mask=[False, *[True] * len(ids), True],
                logprobs=[-0.25] * (len(ids) + 1),
                advantages=[score - 0.5] * (len(ids) + 1),
            ),
        ]
        trace.calls = [ModelCall(node=1, finish_reason="length" if number == 1 else "stop")]
        if number == 7:  # a tool answers, and the model says more
            tool = ToolMessage(tool_call_id="1", content="3")
            trace.nodes += [
                MessageNode(parent=1, message=tool, token_ids=[9, 9], mask=[False] * 2),
                MessageNode(
                    parent=2,
                    message=AssistantMessage(content="so 3"),
                    sampled=True,
                    token_ids=[2, 8, 3],
                    mask=[False, True, True],
                    logprobs=[-0.5, -0.5],
                    advantages=[0.5, 0.5],
                ),
            ]
        trace.record_reward("correct", score)
        trace.record_reward("length", 0.5, weight=0.1)
        trace.ok = True
        run = TrainRunInfo(id="run", work={"type": "train", "step": 3})
        episode = Episode(task=task, traces=[trace], ok=True, run=run)
        episode.group = GroupInfo(id=f"group-{number // 4}")
        write_episode(folder, episode)
    task = TraceTask(type="Sum", data=WireTaskData(idx=9, prompt="?"), key="sum-9")
    failed = Trace(task=task, agent=AgentInfo(config=WireAgentConfig(model="policy")))
    failed.record_error(RuntimeError("the sandbox was lost"))
    write_episode(folder, Episode(task=task, traces=[failed]))


def trl() -> None:
    """TRL 1.16.0's GRPOTrainer: two steps of each of two batches, with log_completions."""
    sys.path.insert(0, str(ROOT))
    from trl_grpo import train

    with tempfile.TemporaryDirectory() as out:
        train(
            policy=str(ROOT / "models/checked_steps/policy"),
            output=Path(out),
            num_steps=4,
            num_prompts=4,
            group_size=4,
            steps_per_generation=2,
            conversation=True,
        )
        shutil.rmtree(FIXTURES / "trl", ignore_errors=True)
        shutil.copytree(Path(out) / "completions", FIXTURES / "trl")


def v_head(folder: Path) -> None:
    """Write the folder of TRL 1.12.0's causal language model with a value head."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl.experimental.ppo import AutoModelForCausalLMWithValueHead

    policy = str(ROOT / "models/checked_steps/policy")
    torch.manual_seed(0)
    causal = AutoModelForCausalLM.from_pretrained(policy, trust_remote_code=False)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        causal, v_head_init_strategy="normal", trust_remote_code=False
    )
    model.is_peft_model = False
    model.save_pretrained(str(folder))
    AutoTokenizer.from_pretrained(policy, trust_remote_code=False).save_pretrained(str(folder))
    ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
    values = model.eval()(ids)[2][0].tolist()
    (folder / "expected.json").write_text(json.dumps({"ids": ids[0].tolist(), "values": values}))


if __name__ == "__main__":
    name, *paths = sys.argv[1:]
    writers = SimpleNamespace(
        verl=verl, results=results, verifiers=verifiers, trl=trl, v_head=v_head
    )
    getattr(writers, name)(*map(Path, paths))
