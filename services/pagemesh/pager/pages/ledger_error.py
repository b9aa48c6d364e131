"""What the ledger raises (``pool``)."""


class LedgerError(AssertionError):
    """A page was moved from a state it is not in: a bug in the pager."""
