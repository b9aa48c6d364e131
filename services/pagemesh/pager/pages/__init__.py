"""The ledger of pages, and lists of them. Pure."""
