"""Names of span attributes and metrics. OpenTelemetry moves its own constants about; these
strings are what dashboards read, so they stand here once.

``GEN_AI_*`` and ``MESSAGING_*`` are OpenTelemetry's names, ``PAGEMESH_*`` are ours.
"""

from __future__ import annotations

from typing import Final

ERROR_TYPE: Final = "error.type"
SERVICE_NAME: Final = "service.name"
SERVICE_VERSION: Final = "service.version"
SERVICE_INSTANCE_ID: Final = "service.instance.id"
HOST_NAME: Final = "host.name"

GEN_AI_OPERATION_NAME: Final = "gen_ai.operation.name"
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_REQUEST_SEED: Final = "gen_ai.request.seed"
GEN_AI_REQUEST_STOP_SEQUENCES: Final = "gen_ai.request.stop_sequences"
GEN_AI_REQUEST_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
GEN_AI_REQUEST_STREAM: Final = "gen_ai.request.stream"
GEN_AI_RESPONSE_ID: Final = "gen_ai.response.id"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_RESPONSE_TIME_TO_FIRST_CHUNK: Final = "gen_ai.response.time_to_first_chunk"
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHE_READ_INPUT_TOKENS: Final = "gen_ai.usage.cache_read.input_tokens"
GEN_AI_PROVIDER: Final = "pagemesh"
"""The value of ``gen_ai.provider.name``."""

METRIC_REQUEST_DURATION: Final = "gen_ai.server.request.duration"
METRIC_TIME_TO_FIRST_TOKEN: Final = "gen_ai.server.time_to_first_token"
METRIC_TIME_PER_OUTPUT_TOKEN: Final = "gen_ai.server.time_per_output_token"

MESSAGING_SYSTEM: Final = "messaging.system"
MESSAGING_SYSTEM_NATS: Final = "nats"
MESSAGING_OPERATION_NAME: Final = "messaging.operation.name"
MESSAGING_OPERATION_TYPE: Final = "messaging.operation.type"
MESSAGING_DESTINATION_NAME: Final = "messaging.destination.name"
MESSAGING_DESTINATION_TEMPLATE: Final = "messaging.destination.template"
"""``wire.subjects.template`` of the subject: low cardinality, never an inbox."""
MESSAGING_MESSAGE_ID: Final = "messaging.message.id"
MESSAGING_CONVERSATION_ID: Final = "messaging.message.conversation_id"
MESSAGING_BODY_SIZE: Final = "messaging.message.body.size"

PAGEMESH_REQUEST: Final = "pagemesh.request"
PAGEMESH_ATTEMPT: Final = "pagemesh.attempt"
PAGEMESH_CHOICE: Final = "pagemesh.choice"
PAGEMESH_WORKER: Final = "pagemesh.worker"
PAGEMESH_LEASE: Final = "pagemesh.lease"
PAGEMESH_TICKET: Final = "pagemesh.ticket"
PAGEMESH_TIER: Final = "pagemesh.tier"
PAGEMESH_PAGE_COUNT: Final = "pagemesh.page.count"
PAGEMESH_TOKENS_AVAILABLE: Final = "pagemesh.tokens.available"
PAGEMESH_TOKENS_SELECTED: Final = "pagemesh.tokens.selected"
PAGEMESH_TOKENS_DELIVERED: Final = "pagemesh.tokens.delivered"
PAGEMESH_TOKENS_LOST: Final = "pagemesh.tokens.lost"
"""A prefix: ``pagemesh.tokens.lost.<reason>``."""
PAGEMESH_TOKENS_COMPUTED: Final = "pagemesh.tokens.computed"
PAGEMESH_TOKENS_TRANSFERRED: Final = "pagemesh.tokens.transferred"
