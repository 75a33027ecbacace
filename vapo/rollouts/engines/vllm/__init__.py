"""Sampling with vLLM: in the trainer's process, or in processes that serve it (docs/rollouts.md).

colocated.py      the engine in this process
process_state.py  restores what creating and running vLLM changes in the process
engine_args.py    from the config to vLLM's arguments, checked
cpu_heads.py      pads head sizes that vLLM's CPU kernels do not have
"""
