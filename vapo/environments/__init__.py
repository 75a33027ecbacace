"""Environments answer the policy's turns: a user's class, or one of the package verifiers."""
