"""The one error that a user's input can cause; the command line prints it without a traceback."""


class UserError(Exception):
    """Bad config, data, model folder or environment: names the key, file or row, and the mend."""
