"""Runs a user's code, and chat templates, in processes of their own, with limits on time and
memory."""
