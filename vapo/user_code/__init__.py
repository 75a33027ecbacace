"""A user's code, and chat templates, in processes of their own: hosts, protocol, limits, memory."""
