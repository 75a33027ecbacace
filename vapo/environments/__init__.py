"""Environments, which reply to the policy's turns: a user's class, or one of the package
verifiers."""
