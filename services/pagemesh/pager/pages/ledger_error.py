"""The error that the ledger (``pool``) raises."""


class LedgerError(AssertionError):
    """A page was moved from a state it is not in: a bug in the pager."""
