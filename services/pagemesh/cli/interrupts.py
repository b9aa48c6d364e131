"""Ctrl-C while Python imports."""

import signal


class EndAtOnce:
    """While entered, Ctrl-C ends this process without a word. As an exception it would show a
    traceback of imports, or be lost in one of their callbacks."""

    def __enter__(self) -> None:
        # A shell's background job ignores it: so do we.
        self._is_set = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._is_set:
            signal.signal(signal.SIGINT, signal.SIG_DFL)

    def __exit__(self, *_: object) -> None:
        if self._is_set:
            signal.signal(signal.SIGINT, signal.default_int_handler)
