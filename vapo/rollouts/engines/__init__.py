"""Sampling engines: the contract, and what does not depend on the engine."""
