"""Exceptions that mean "the user can fix this"."""


class UserError(ValueError):
    """Bad input: one line that names the field or file, what was expected, what was found, and what to do.

    The command line prints the message and exits with status 2. Everything else that is raised is a bug (status 1).
    """


class DivergedError(UserError):
    """A loss or gradient that is not finite."""
