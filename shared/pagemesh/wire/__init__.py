"""What travels between processes: messages, subjects, ids, errors and the pool file's format.

Importing this package registers every message type.
"""

from pagemesh.wire import (
    pager_messages,
    pager_reports,
    pool_memory,
    presence,
    work_messages,
)

__all__ = ["pager_messages", "pager_reports", "pool_memory", "presence", "work_messages"]
