"""Rewards: response text and reference answer -> verdict and reward."""
