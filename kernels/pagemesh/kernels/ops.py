"""Every operation the engine calls, in one place; contracts are in the operations' folders."""

from pagemesh.kernels.batch import RaggedBatch, ragged_batch
from pagemesh.kernels.decoder_step import DecoderPlan, DecoderStep, LayerWeights
from pagemesh.kernels.decoder_step.run import Drafts, Heat, RunDone, RunTerms
from pagemesh.kernels.dispatch import backend, identity
from pagemesh.kernels.edit_rows import RowEdits, edit_rows, restore_rows
from pagemesh.kernels.kv_pool import KvPool
from pagemesh.kernels.kv_write import kv_write
from pagemesh.kernels.layout import PageLayout
from pagemesh.kernels.linear import PackedLinear, linear, pack_linear, packed_shape
from pagemesh.kernels.log_softmax import log_softmax
from pagemesh.kernels.page_copy import page_copy
from pagemesh.kernels.paged_attention import paged_attention
from pagemesh.kernels.paged_prefill import paged_prefill
from pagemesh.kernels.rms_norm import rms_norm
from pagemesh.kernels.rope import rope
from pagemesh.kernels.silu_mul import silu_mul
from pagemesh.kernels.softmax_draw import Limits as DrawLimits
from pagemesh.kernels.softmax_draw import softmax_draw
from pagemesh.kernels.top_scores import top_scores

__all__ = [
    "DecoderPlan",
    "DecoderStep",
    "Drafts",
    "DrawLimits",
    "Heat",
    "KvPool",
    "LayerWeights",
    "PackedLinear",
    "PageLayout",
    "RaggedBatch",
    "RowEdits",
    "RunDone",
    "RunTerms",
    "backend",
    "edit_rows",
    "identity",
    "kv_write",
    "linear",
    "log_softmax",
    "pack_linear",
    "packed_shape",
    "page_copy",
    "paged_attention",
    "paged_prefill",
    "ragged_batch",
    "restore_rows",
    "rms_norm",
    "rope",
    "silu_mul",
    "softmax_draw",
    "top_scores",
]
