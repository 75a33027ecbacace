"""Rewards: a response's text is compared with the reference answer, which gives verdict and
reward."""
