"""The events of a request's core and the commands it returns: plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from pagemesh.wire.errors import Fault
from pagemesh.wire.messages import Ok, Refused, SequenceKey
from pagemesh.wire.pager_messages import Admit
from pagemesh.wire.presence import PageNeeds
from pagemesh.wire.tokens import U32
from pagemesh.wire.work_messages import Abort, Accepted, Frame, Resend, Submit, TopLogprobs


@dataclass(frozen=True, slots=True, order=True)
class Worker:
    """One incarnation of a worker."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class PagesFrom:
    """How to ask for pages in a worker's name: which pager, of which epoch, and how many."""

    host: str
    epoch: int
    needs: PageNeeds


@dataclass(frozen=True, slots=True)
class Route:
    """Who takes a request: ``worker`` gets the ``Submit`` and hands the sequence over to ``decode``
    (None: it keeps it). ``root`` is the tenant's root under ``model_root``."""

    worker: Worker
    decode: Worker | None
    model_root: bytes
    root: bytes
    predicted_tokens: int
    """Tokens the router expects to be cached there: a hint for traces, never trusted."""
    elsewhere_tokens: int = 0
    """How many more it expects on another host, which it passed over because of its load."""
    pages: PagesFrom | None = None
    """Whom to ask for pages in the worker's name; None: the worker asks by itself."""
    tokens: U32 | None = field(default=None, compare=False, repr=False)
    """The tokens that the route was chosen for."""


# Events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """The request was validated and has all it needs."""


@dataclass(frozen=True, slots=True)
class Routed:
    route: Route


@dataclass(frozen=True, slots=True)
class Unroutable:
    """No worker can take the request now. ``fault`` is what the client is told if that does not
    change; ``expected``: a worker is probably on its way back."""

    fault: Fault
    expected: bool = False


@dataclass(frozen=True, slots=True)
class SubmitAnswered:
    """A transport failure arrives as a ``Refused`` too, so every submit is answered."""

    attempt: int
    worker: Worker
    answer: Accepted | Refused


@dataclass(frozen=True, slots=True)
class ResendAnswered:
    key: SequenceKey
    worker: Worker
    answer: Ok | Refused


@dataclass(frozen=True, slots=True)
class FrameArrived:
    worker: Worker
    frame: Frame


@dataclass(frozen=True, slots=True)
class FramesMissed:
    """A counter gap: at least one message of ``worker`` was lost on the way to us."""

    worker: Worker


@dataclass(frozen=True, slots=True)
class WorkerLost:
    worker: Worker


WhyCancelled = Literal["left", "slow", "stopped"]
"""The client disconnected, it reads too slowly, or the gateway stops."""


@dataclass(frozen=True, slots=True)
class ClientGone:
    """Nobody will read the answer."""

    why: WhyCancelled = "left"


@dataclass(frozen=True, slots=True)
class Tick:
    """``RequestCore.due_ms`` has come."""


Event = (
    Begin
    | Routed
    | Unroutable
    | SubmitAnswered
    | ResendAnswered
    | FrameArrived
    | FramesMissed
    | WorkerLost
    | ClientGone
    | Tick
)


# Commands -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ChooseRoute:
    """Ask the router; the answer is ``Routed`` or ``Unroutable``.

    ``tokens`` is what the worker must have in its cache or compute. ``model_root`` is set once
    tokens were delivered or while another choice is placed: one answer comes from one set of
    weights. ``after``: the code of the fault that ended the attempt before; empty for the first.
    """

    tokens: U32
    growth_tokens: int
    choice_count: int
    avoid: frozenset[Worker]
    model_root: bytes | None
    after: str = ""


@dataclass(frozen=True, slots=True)
class AskPages:
    """Ask the pager of ``host`` in a worker's name; the answer goes to that worker."""

    host: str
    message: Admit


@dataclass(frozen=True, slots=True)
class SendSubmit:
    """``pages`` goes out right behind the ``Submit``."""

    worker: Worker
    message: Submit
    timeout_ms: int
    pages: AskPages | None = None


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Send without waiting: if the abort is lost, the frames that still come trigger another."""

    worker: Worker
    message: Abort


@dataclass(frozen=True, slots=True)
class SendResend:
    worker: Worker
    message: Resend
    timeout_ms: int


@dataclass(frozen=True, slots=True)
class PromptScored:
    """Log-probabilities of prompt positions 1 and on; at most once per request."""

    logprobs: TopLogprobs


@dataclass(frozen=True, slots=True)
class Deliver:
    """New tokens of ``choice`` for the client, from generated position ``first_position``.

    ``text`` may lag behind the tokens (incomplete characters, a possible stop string).
    The last ``hidden_count`` tokens (an end token) count but are no part of the text."""

    choice: int
    first_position: int
    tokens: U32
    text: str
    logprobs: TopLogprobs | None
    hidden_count: int


StopReason = str | int | None
"""The stop string or stop token that ended a choice; None: the model's end, or the limit."""


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """``text`` is the rest, which had been held back."""

    choice: int
    finish: Literal["stop", "length"]
    stop_reason: StopReason
    text: str


@dataclass(frozen=True, slots=True)
class Completed:
    """Every choice ended."""


@dataclass(frozen=True, slots=True)
class Failed:
    fault: Fault


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Nobody will read the answer."""

    why: WhyCancelled = "left"


@dataclass(frozen=True, slots=True)
class Ended:
    """The one terminal event."""

    outcome: Completed | Failed | Cancelled


Command = (
    ChooseRoute | SendSubmit | SendAbort | SendResend | PromptScored | Deliver | ChoiceEnded | Ended
)
