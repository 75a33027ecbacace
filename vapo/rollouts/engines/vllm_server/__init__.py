"""`vllm serve` processes as the rollout engine, on other devices or hosts."""
