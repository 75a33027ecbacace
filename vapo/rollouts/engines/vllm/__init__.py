"""Sampling with vLLM: in the trainer's process, or in processes that serve it (docs/rollouts.md).

sampler.py        the `Sampler`: requests out, rollouts back, weights pushed and checked
engine.py         what a sampler needs of an engine, and the errors of engines
colocated.py      the engine in this process
process_state.py  what creating and running vLLM changes in the process, put back
engine_args.py    from the config to vLLM's arguments, checked
remote.py         engines in other processes, which run
server.py         an engine behind HTTP
server_handler.py, server_requests.py: what it does with a request, and which ones it takes
access_token.py   the secret that it shares with trainers
watchdog.py       ends a wait for an engine that hangs
cpu_heads.py      head sizes that vLLM's CPU kernels do not have
sync_check.py     did the weights arrive?
"""
