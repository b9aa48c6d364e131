"""The ledger of pages, and lists of pages. Pure."""
