"""Frames for gateways: one message per event and gateway, or several if one would be too large.
Messages are numbered, so that a gateway notices a lost one.

There is no separate resend buffer: a sequence keeps its tokens until it is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pagemesh.engine.worker.desk import Desk, Line
from pagemesh.engine.worker.events import SendFrames
from pagemesh.engine.worker.plan import TokenScores
from pagemesh.engine.worker.sequence import Phase, Sequence
from pagemesh.wire.errors import Malformed
from pagemesh.wire.tokens import pack
from pagemesh.wire.work_messages import Frame, Frames, TopLogprobs

_FRAME_BYTES, _HYPOTHESIS_BYTES, _CHARACTER_BYTES = 1_024, 256, 4
"""Upper bounds: a frame or a hypothesis without tokens and scores, and a character of text."""


def tell(desk: Desk, sequence: Sequence, first_position: int) -> None:
    """Add a frame to the next message to the sequence's gateway: the tokens from
    ``first_position`` on, and the finish reason if the sequence has ended."""
    end = sequence.generated_count
    desk.lines[sequence.owner].frames.append(_frame(sequence, first_position, end))
    sequence.waterfall_told = True


def tell_again(desk: Desk, sequence: Sequence, position: int) -> None:
    """Add frames with the tokens from ``position`` on. Tokens that have no log-probabilities here
    go in a frame of their own, and so do the scores of the prompt, beside which a message may
    have no room for tokens. If there is nothing new, nothing is sent: lost messages must not
    breed more messages."""
    if position >= sequence.generated_count and sequence.phase is not Phase.DONE:
        return
    end = min(sequence.generated_count, position + desk.limits.resend_tokens_max)
    frames = desk.line(sequence.owner).frames
    if sequence.prompt_logprobs and not sequence.scoring:
        frames.append(_frame(sequence, position, position, again=True, with_prompt=True))
        if position >= end:
            return
    scored = sequence.scored_from
    if sequence.sampling.logprobs is not None and position < scored < end:
        frames.append(_frame(sequence, position, scored))
        position = scored
    frames.append(_frame(sequence, min(position, end), end, again=True))


def _frame(
    sequence: Sequence, first: int, end: int, *, again: bool = False, with_prompt: bool = False
) -> Frame:
    prompt = sequence.prompt_count
    tokens = sequence.tokens.view(prompt + first, prompt + end)
    complete = end == sequence.generated_count and sequence.phase is Phase.DONE
    drawn, chosen = sequence.start_count, sequence.scored_from
    wanted = sequence.sampling.logprobs is not None and end > first >= chosen
    # The scores of the prompt come with the first token, or alone when none is wanted; they
    # may have been lost although the tokens after them were not.
    is_first = not again and first == drawn and (end > first or complete)
    scored = with_prompt or (sequence.prompt_logprobs and not sequence.scoring and is_first)
    fresh = not sequence.waterfall_told or (again and first <= drawn)
    return Frame(
        key=sequence.key,
        first_position=first,
        tokens=pack(tokens),
        logprobs=packed_scores(sequence.scores[first - chosen : end - chosen]) if wanted else None,
        prompt_logprobs=packed_scores(sequence.prompt_scores) if scored else None,
        waterfall=sequence.waterfall if fresh else None,
        computed_tokens=sequence.computed_tokens,
        finish=sequence.finish if complete else None,
        stop_token=sequence.stop_token if complete else None,
        error=sequence.failure if complete else None,
        hypotheses=sequence.beams.hypotheses if complete and sequence.beams else None,
    )


def packed_scores(scores: Iterable[TokenScores]) -> TopLogprobs:
    """The scores of consecutive tokens, joined."""
    runs = list(scores)
    return TopLogprobs(
        chosen=b"".join(run.chosen for run in runs),
        width=runs[0].width if runs else 0,
        top_tokens=b"".join(run.top_tokens for run in runs),
        top_values=b"".join(run.top_values for run in runs),
    )


def unpacked_scores(scores: TopLogprobs | None, tokens_max: int) -> list[TokenScores]:
    """The reverse of ``packed_scores``, one entry per token. Raises ``Malformed`` when the sizes
    do not match, or when there are scores of more than ``tokens_max`` tokens."""
    if scores is None:
        return []
    count, row_bytes = len(scores.chosen) // 4, 4 * scores.width
    sizes = (len(scores.chosen), len(scores.top_tokens), len(scores.top_values))
    if count > tokens_max or sizes != (4 * count, count * row_bytes, count * row_bytes):
        raise Malformed(
            f"logprobs: sizes of {sizes} bytes do not match at most {tokens_max} tokens"
        )
    return [
        TokenScores(
            chosen=scores.chosen[4 * at : 4 * at + 4],
            width=scores.width,
            top_tokens=scores.top_tokens[row_bytes * at : row_bytes * (at + 1)],
            top_values=scores.top_values[row_bytes * at : row_bytes * (at + 1)],
        )
        for at in range(count)
    ]


def flush(desk: Desk, lines: Iterable[Line]) -> None:
    """Send the frames that were added to ``lines``."""
    for line in lines:
        frames, line.frames = line.frames, []
        for part in _parts(frames, desk.limits.frames_bytes_max):
            line.counter += 1
            _send(desk, line, part)


def _parts(frames: list[Frame], bytes_max: int) -> Iterator[list[Frame]]:
    """``frames`` in their order, in as few lists as fit into a message each."""
    part: list[Frame] = []
    part_bytes = 0
    for frame in frames:
        own_bytes = _bytes_at_most(frame)
        if part and part_bytes + own_bytes > bytes_max:
            yield part
            part, part_bytes = [], 0
        part.append(frame)
        part_bytes += own_bytes
    if part:
        yield part


def _bytes_at_most(frame: Frame) -> int:
    total = _FRAME_BYTES + len(frame.tokens)
    if frame.logprobs is not None:
        total += _bytes_of(frame.logprobs)
    if frame.prompt_logprobs is not None:
        total += _bytes_of(frame.prompt_logprobs)
    if frame.error is not None:
        total += _CHARACTER_BYTES * len(frame.error.message)
    for one in frame.hypotheses or ():
        total += _HYPOTHESIS_BYTES + len(one.tokens) + _bytes_of(one.logprobs)
    return total


def _bytes_of(scores: TopLogprobs) -> int:
    return len(scores.chosen) + len(scores.top_tokens) + len(scores.top_values)


def beat(desk: Desk) -> None:
    """Send the last counter again to gateways that wait for a sequence, or did until just now."""
    for line in desk.lines.values():
        if line.frames or line.last_ms + desk.limits.beat_ms > desk.now:
            continue  # frames were sent lately, or ``go_on`` sends them
        if line.live_count:
            _send(desk, line, [])
        elif line.beats_left:
            line.beats_left -= 1
            _send(desk, line, [])


def _send(desk: Desk, line: Line, frames: list[Frame]) -> None:
    line.last_ms = desk.now
    desk.commands.append(
        SendFrames(
            line.owner.name,
            Frames(
                worker=desk.identity.name,
                incarnation=desk.identity.incarnation,
                gateway_incarnation=line.owner.incarnation,
                counter=line.counter,
                frames=frames,
            ),
        )
    )
