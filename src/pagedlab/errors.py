"""The one exception that a user's mistake raises."""


class UserError(ValueError):
    """Bad input: the message is one sentence that says what is wrong and what to do.

    The command line prints it after ``pagedlab: `` and exits with status 2; a program sees a
    ``ValueError``. Nothing is half-written or half-changed when it is raised.
    """
