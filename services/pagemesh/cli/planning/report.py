"""A plan as text for people and as JSON for programs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pagemesh.cli.planning.assemble import Plan, SessionFit
from pagemesh.cli.planning.memory import (
    TAIL_SHARE_MAX,
    growth_slack,
    length_for_tail,
    mean_tail_slots,
    shared_saving,
)
from pagemesh.cli.words import counted
from pagemesh.runtime.sizes import shown_binary, shown_both

_LABEL_WIDTH = 13
_LENGTHS_SHOWN_MAX = 6


def text_report(plan: Plan) -> str:
    """The plan, one fact per line."""
    lines = [
        *_model_lines(plan), *_memory_lines(plan), *_session_lines(plan),
        *_tier_lines(plan), *_waste_lines(plan), *_over_time_lines(plan), *_notes(plan),
    ]  # fmt: skip
    return "\n".join(line.rstrip() for line in lines)


def _row(label: str, text: str) -> str:
    return f"{label:<{_LABEL_WIDTH}}{text}"


def _model_lines(plan: Plan) -> Iterator[str]:
    shape, page = plan.shape, plan.page
    yield _row(
        "model",
        f"{plan.name}: {counted(shape.layer_count, 'layer')}, "
        f"{counted(shape.kv_head_count, 'KV head')} x {shape.head_dim} "
        f"({shape.sharing}, {counted(shape.head_count, 'query head')}), "
        f"context {shape.context_tokens_max:,}",
    )
    yield _row(
        "KV",
        f"{page.kv.name}: {shown_binary(page.token_bytes)} a token, "
        f"{shown_binary(page.page_bytes)} a page of {page.page_size} tokens",
    )
    if shape.sharing != "multi-head":
        yield _row(
            "",
            f"as multi-head it would be {shown_binary(plan.multi_head_page.token_bytes)} a token",
        )
    if page.device_count > 1:
        copies = f" (each on {page.copies} devices)" if page.copies > 1 else ""
        yield _row(
            "devices",
            f"{page.device_count}, KV heads on each: {page.device_head_count}{copies}; "
            f"{shown_binary(page.device_page_bytes)} a page on each",
        )


def _memory_lines(plan: Plan) -> Iterator[str]:
    if plan.weights is not None:
        yield _row("weights", f"{shown_both(plan.weights.count_bytes)}: {plan.weights.source}")
    budget = plan.budget
    if budget is not None:
        yield _row(
            "memory",
            f"{budget.device_count} x {shown_both(budget.memory_bytes)}, {budget.share:.0%} usable:"
            f" {budget.weights_share:.0%} weights, {1 - budget.weights_share:.0%} KV",
        )
    pages = plan.pages
    yield _row(
        "pool",
        f"{shown_both(pages * plan.page.page_bytes)}: {pages:,} pages, "
        f"{pages * plan.page.page_size:,} tokens (headers take "
        f"{shown_binary(pages * plan.page.header_bytes)} more)",
    )


def _session_lines(plan: Plan) -> Iterator[str]:
    label = "sessions"
    for session in plan.sessions:
        yield _row(
            label,
            f"{int(session.fit):>7,} of {session.tokens:,} tokens "
            f"({shown_both(session.count_bytes)} each; exactly {session.fit:.2f})",
        )
        label = ""
    if plan.shared_tokens and plan.sessions:
        fit = int(plan.sessions[-1].fit)
        saved = f", {shared_saving(fit):.1%} of its memory saved" if fit > 1 else ""
        short = plan.shared_tokens >= plan.sessions[0].tokens
        rest = "; sessions no longer than that share all but one" if short else ""
        yield _row("", f"with the first {plan.shared_tokens:,} tokens shared by all{saved}{rest}")
    if plan.windowed is not None:
        yield _row(
            "windows",
            f"{plan.shape.window_layer_count} of {plan.shape.layer_count} layers look back "
            f"{plan.shape.window_tokens:,} tokens; if their pages went early, "
            f"{int(plan.windowed.fit):,} of {plan.windowed.tokens:,} tokens would fit, "
            f"{shown_both(plan.windowed.count_bytes)} each",
        )


def _tier_lines(plan: Plan) -> Iterator[str]:
    for tier in plan.tiers:
        yield _row(
            tier.name,
            f"{shown_both(tier.count_bytes)}: {tier.pages:,} pages, "
            f"{tier.pages * plan.page.page_size:,} tokens",
        )


def _waste_lines(plan: Plan) -> Iterator[str]:
    yield ""
    yield _row("waste", f"{'page':>10}  tail, mean  <{TAIL_SHARE_MAX:.0%} from  growth, at most")
    length = plan.waste_tokens
    for size, bytes_each in plan.page_sizes:
        tail = mean_tail_slots(size)
        slack = growth_slack(length, size, plan.pace.growth_pages)
        mark = "*" if size == plan.page.page_size else " "
        yield _row(
            "",
            f"{size:>4} tokens{mark} {tail:>5} slots  {length_for_tail(size):>5,.0f} tokens"
            f"  {slack:>7.2%} of {length:,}   ({shown_binary(bytes_each)})",
        )
    yield ""
    shown = ", ".join(f"{tokens:,}" for tokens in plan.lengths[:_LENGTHS_SHOWN_MAX])
    if len(plan.lengths) > _LENGTHS_SHOWN_MAX:
        shown += f" and {len(plan.lengths) - _LENGTHS_SHOWN_MAX:,} more"
    yield _row("", f"sequences of {shown or f'{length:,}'} tokens:")
    for name, waste in plan.wastes:
        yield _row(
            "",
            f"{name:<28} {waste.wasted_slots:>9,} of {waste.taken_slots:>9,} slots wasted "
            f"({_percent(waste.share)})",
        )


def _over_time_lines(plan: Plan) -> Iterator[str]:
    pace = plan.pace
    yield ""
    yield _row(
        "",
        f"over time, prompts computed at {pace.prompt_tokens_s:,} tokens/s and the last "
        f"{pace.answer_tokens:,} tokens drawn at {pace.answer_tokens_s:,}/s:",
    )
    yield _row("", f"{'page':>10}  {'tail':>8}{'growth':>10}{'prompt':>10}{'all':>10}")
    for size, waste in plan.over_time:
        mark = "*" if size == plan.page.page_size else " "
        shares = (waste.tail, waste.growth, waste.prompt, waste.total)
        yield _row("", f"{size:>4} tokens{mark} " + "  ".join(f"{s:>8.2%}" for s in shares))


def _notes(plan: Plan) -> Iterator[str]:
    if plan.notes:
        yield ""
    for note in plan.notes:
        yield _row("note", note)


def _percent(share: float) -> str:
    """One decimal, or two for less than 1 %."""
    return f"{share:.1%}" if share >= 0.01 else f"{share:.2%}"


def json_report(plan: Plan) -> dict[str, Any]:
    """Every number of the plan; sizes in bytes, shares from 0 to 1."""
    return {
        **_json_model(plan),
        **_json_memory(plan),
        **_json_use(plan),
        "notes": list(plan.notes),
    }


def _json_model(plan: Plan) -> dict[str, Any]:
    shape, page = plan.shape, plan.page
    return {
        "model": {
            "name": plan.name,
            "family": shape.family,
            "layers": shape.layer_count,
            "query_heads": shape.head_count,
            "kv_heads": shape.kv_head_count,
            "head_dim": shape.head_dim,
            "context_tokens": shape.context_tokens_max,
            "sharing": shape.sharing,
            "window_layers": shape.window_layer_count,
            "window_tokens": shape.window_tokens,
        },
        "kv": {
            "dtype": page.kv.name,
            "served": page.kv.served,
            "bits_per_element": page.kv.bits(shape.head_dim),
            "finite_max": page.kv.finite_max,
            "token_bytes": page.token_bytes,
            "multi_head_token_bytes": plan.multi_head_page.token_bytes,
            "page_size": page.page_size,
            "page_bytes": page.page_bytes,
            "header_bytes": page.header_bytes,
        },
    }


def _json_memory(plan: Plan) -> dict[str, Any]:
    page, budget = plan.page, plan.budget
    return {
        "devices": {
            "count": page.device_count,
            "kv_heads": page.device_head_count,
            "copies_of_a_head": page.copies,
            "page_bytes": page.device_page_bytes,
        },
        "weights_bytes": plan.weights.count_bytes if plan.weights else None,
        "weights_parameters": plan.weights.parameter_count if plan.weights else None,
        "memory": None
        if budget is None
        else {
            "device_bytes": budget.memory_bytes,
            "share": budget.share,
            "usable_bytes": budget.usable_bytes,
            "weights_share": budget.weights_share,
            "kv_bytes": budget.kv_bytes,
        },
        "pool": {
            "pages": plan.pages,
            "tokens": plan.pages * page.page_size,
            "bytes": plan.pages * page.page_bytes,
        },
    }


def _json_session(session: SessionFit) -> dict[str, Any]:
    return {"tokens": session.tokens, "bytes": session.count_bytes, "fit": session.fit}


def _json_use(plan: Plan) -> dict[str, Any]:
    return {
        "sessions": [_json_session(one) for one in plan.sessions],
        "shared_tokens": plan.shared_tokens,
        "windowed_session": None if plan.windowed is None else _json_session(plan.windowed),
        "tiers": [
            {"name": tier.name, "bytes": tier.count_bytes, "pages": tier.pages}
            for tier in plan.tiers
        ],
        "waste": [
            {
                "of": name,
                "wasted_slots": waste.wasted_slots,
                "taken_slots": waste.taken_slots,
                "share": waste.share,
            }
            for name, waste in plan.wastes
        ],
        "waste_over_time": _json_over_time(plan),
        "page_sizes": [
            {
                "page_size": size,
                "page_bytes": bytes_each,
                "mean_tail_slots": mean_tail_slots(size),
                "length_for_small_tail": length_for_tail(size),
                "growth_slack": growth_slack(plan.waste_tokens, size, plan.pace.growth_pages),
            }
            for size, bytes_each in plan.page_sizes
        ],
    }


def _json_over_time(plan: Plan) -> dict[str, Any]:
    pace = plan.pace
    return {
        "answer_tokens": pace.answer_tokens,
        "prompt_tokens_per_s": pace.prompt_tokens_s,
        "answer_tokens_per_s": pace.answer_tokens_s,
        "chunk_tokens": pace.chunk_tokens,
        "prompt_chunks": pace.prompt_chunks,
        "page_sizes": [
            {
                "page_size": size,
                "tail": waste.tail,
                "growth": waste.growth,
                "prompt": waste.prompt,
                "total": waste.total,
            }
            for size, waste in plan.over_time
        ],
    }
