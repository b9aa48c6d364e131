"""What can happen to a request, and what its core asks to be done: plain values."""

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
    """One life of a worker."""

    name: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class PagesFrom:
    """How pages for a worker's prompts are asked for: at which pager, of which life, and which."""

    host: str
    epoch: int
    needs: PageNeeds


@dataclass(frozen=True, slots=True)
class Route:
    """Who takes a request: ``worker`` gets the ``Submit``, ``decode`` is whom it hands over
    to (nobody: it keeps the sequence). ``root`` is the tenant's under ``model_root``."""

    worker: Worker
    decode: Worker | None
    model_root: bytes
    root: bytes
    predicted_tokens: int
    """Tokens the router expects to be cached there: a hint for traces, never trusted."""
    elsewhere_tokens: int = 0
    """More tokens that it expects on another host, which it passed over for its queue."""
    pages: PagesFrom | None = None
    """Whom to ask for pages in the worker's name; None: it asks for itself."""
    tokens: U32 | None = field(default=None, compare=False, repr=False)
    """For which it was chosen."""


# Events -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Begin:
    """The request was validated and has all it needs."""


@dataclass(frozen=True, slots=True)
class Routed:
    route: Route


@dataclass(frozen=True, slots=True)
class Unroutable:
    """Nobody can take it now; ``fault`` is what the client hears if that stays so.
    ``expected``: a worker is probably on its way back."""

    fault: Fault
    expected: bool = False


@dataclass(frozen=True, slots=True)
class SubmitAnswered:
    """A transport failure arrives as a ``Refused`` too: silence is never an answer."""

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
    """Nobody will hear the answer."""

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

    ``tokens`` is what the worker must have in its cache or compute. ``model_root`` is set
    once tokens were delivered: other weights must not continue them.
    """

    tokens: U32
    growth_tokens: int
    choice_count: int
    avoid: frozenset[Worker]
    model_root: bytes | None


@dataclass(frozen=True, slots=True)
class AskPages:
    """Have the pager of ``host`` answer ``message`` to the worker in whose name it is."""

    host: str
    message: Admit


@dataclass(frozen=True, slots=True)
class SendSubmit:
    """``pages`` is to go out right behind it."""

    worker: Worker
    message: Submit
    timeout_ms: int
    pages: AskPages | None = None


@dataclass(frozen=True, slots=True)
class SendAbort:
    """Send and do not wait: an abort that is lost is made good when a frame comes after it."""

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
    """``text`` is what had been held back."""

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
    """Nobody will hear it."""

    why: WhyCancelled = "left"


@dataclass(frozen=True, slots=True)
class Ended:
    """The one terminal event."""

    outcome: Completed | Failed | Cancelled


Command = (
    ChooseRoute | SendSubmit | SendAbort | SendResend | PromptScored | Deliver | ChoiceEnded | Ended
)
