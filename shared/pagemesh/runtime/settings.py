"""Every setting: one dataclass per concern. The defaults work without configuration."""

# ruff: noqa: RUF009  (a Secret is immutable, which ruff cannot know)

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from pagemesh.kernels.layout import KvDtype
from pagemesh.kernels.weight_types import ASKED_TYPES, AskedType
from pagemesh.runtime.config import Secret, computed, setting
from pagemesh.runtime.ids import check_carried, check_name, host_name
from pagemesh.runtime.origins import parse_origins
from pagemesh.runtime.ports import is_url, shown_urls
from pagemesh.runtime.user_paths import expanded
from pagemesh.wire.errors import ConfigError

NATS_URL = "nats://127.0.0.1:4222"
SHARED_MEMORY = Path("/dev/shm")
MINUTE_MS = 60_000
GenerationConfig = Literal["auto", "none"]
_DEVICE_TYPES = ("float32", "bfloat16", "float16")


def default_pool_dir() -> Path:
    """A folder of this user in the shared-memory file system, or in the temporary one."""
    base = SHARED_MEMORY if SHARED_MEMORY.is_dir() else Path(tempfile.gettempdir())
    return base / f"pagemesh-{os.getuid()}"


@dataclass(frozen=True, slots=True)
class BusConfig:
    """The connection to NATS."""

    url: str = setting(NATS_URL, "NATS", "NATS server URL, or several separated by commas.")
    user: str = setting("", "NATS_USER", "NATS user. Default: none.")
    password: Secret = setting(Secret(), "NATS_PASSWORD", "Password of the NATS user.")
    ca_file: str = setting(
        "", "NATS_TLS_CA", "PEM file of the CA that signed the server's certificate; makes TLS "
        "mandatory. Default, for tls:// URLs: the system's CAs.",
    )  # fmt: skip
    cert_file: str = setting(
        "", "NATS_TLS_CERT", "PEM file of the client certificate, if the server asks for one."
    )
    key_file: str = setting(
        "", "NATS_TLS_KEY", "PEM file of the client's key. Default: the certificate's file."
    )
    connect_timeout_ms: int = setting(
        2_000, "NATS_CONNECT_TIMEOUT_MS", "Timeout of one connection attempt, in ms.",
        minimum=1, maximum=MINUTE_MS,
    )  # fmt: skip
    start_wait_ms: int = setting(
        5_000, "NATS_START_WAIT_MS", "How long commands try to connect, in ms; services try on.",
        minimum=0, maximum=60 * MINUTE_MS,
    )  # fmt: skip
    reconnect_wait_ms: int = setting(
        50, "NATS_RECONNECT_WAIT_MS", "First delay between attempts, in ms; doubles each time.",
        minimum=1, maximum=MINUTE_MS,
    )  # fmt: skip
    reconnect_wait_ms_max: int = setting(
        1_000, "NATS_RECONNECT_WAIT_MS_MAX", "Longest delay between attempts, in ms.",
        minimum=1, maximum=MINUTE_MS,
    )  # fmt: skip
    heartbeat_ms: int = setting(
        500, "NATS_HEARTBEAT_MS", "Interval between pings of the server, in ms.",
        minimum=10, maximum=MINUTE_MS,
    )  # fmt: skip
    heartbeat_timeout_ms: int = setting(
        1_800, "NATS_HEARTBEAT_TIMEOUT_MS", "Silence after which the connection is lost, in ms.",
        minimum=10, maximum=MINUTE_MS,
    )  # fmt: skip
    request_count_max: int = setting(
        16_384, "NATS_REQUEST_COUNT_MAX", "Maximum requests waiting for a reply.",
        minimum=1, maximum=1 << 20,
    )  # fmt: skip
    output_bytes_max: int = setting(
        32 << 20, "NATS_OUTPUT_BYTES_MAX", "Maximum size of unsent output.",
        minimum=1 << 16, maximum=1 << 30, size=True,
    )  # fmt: skip

    @property
    def unnoticed_ms(self) -> int:
        """The longest time for which a lost connection may go unnoticed."""
        return self.heartbeat_ms + self.heartbeat_timeout_ms

    @property
    def servers(self) -> list[str]:
        """The URLs. Raises ``ConfigError`` for one that cannot be used."""
        urls = [part.strip() for part in self.url.split(",") if part.strip()]
        if not urls or not all(is_url(url, ("nats", "tls")) for url in urls):
            hint = "; set PAGEMESH_NATS_PASSWORD to the password" if "@" in self.url else ""
            raise ConfigError(
                f"PAGEMESH_NATS={self.shown_url!r} is not a NATS URL such as {NATS_URL}{hint}"
            )
        return [urlsplit(url).geturl() for url in urls]  # the client wants a scheme in lower case

    @property
    def demands_tls(self) -> bool:
        """Whether to send nothing to a server that does not encrypt."""
        return bool(self.ca_file or self.cert_file or "tls://" in self.url.lower())

    @property
    def shown_url(self) -> str:
        """The URLs without user and password, for messages and logs."""
        return shown_urls(self.url)


@dataclass(frozen=True, slots=True)
class HostConfig:
    """The host and its services."""

    host: str = computed(host_name, "HOST", "Name of this host on the mesh; not an address.")
    name: str = setting("", "NAME", "Name of this service. Default: its role and a random suffix.")
    pool_dir: Path = computed(
        default_pool_dir, "POOL_DIR", "Folder for page pools, best on a shared-memory file system."
    )
    secret: Secret = setting(
        Secret(), "SECRET", "Key of prefix ids and tenant salts; the same on every service.",
        strong=True,
    )  # fmt: skip
    drain_ms: int = setting(
        30_000, "DRAIN_MS", "Time to finish running requests when stopped, in ms.",
        minimum=0, maximum=10 * MINUTE_MS,
    )  # fmt: skip
    step_ms_max: int = setting(
        5 * MINUTE_MS, "STEP_MS_MAX", "Time limit of a model step, in ms. A worker that exceeds "
        "it exits to be restarted; the pager waits as long for its pages.",
        minimum=1_000, maximum=24 * 60 * MINUTE_MS,
    )  # fmt: skip

    def __post_init__(self) -> None:
        """Raises ``ConfigError`` for an invalid name, or a path that messages cannot carry."""
        check_name("HOST", self.host)
        check_carried("POOL_DIR", str(self.pool_dir), characters_max=900)  # plus a file name

    def required_secret(self) -> bytes:
        """The secret. Raises ``ConfigError`` when none was given."""
        if not self.secret.is_set:
            raise ConfigError(
                "PAGEMESH_SECRET is not set; give every service the same random text, "
                "for example from: openssl rand -hex 32"
            )
        return self.secret.reveal_bytes()


@dataclass(frozen=True, slots=True)
class PagerConfig:
    """The pager."""

    pool_bytes: int = setting(
        512 << 20, "POOL_BYTES", "Memory for KV pages.",
        minimum=1 << 16, maximum=1 << 44, size=True,
    )  # fmt: skip
    eviction: Literal["learned", "lru", "lfu", "s3-fifo", "priority", "cost"] = setting(
        "learned", "EVICTION", "Eviction policy for cached pages."
    )
    disk_dir: str = setting(
        "", "DISK_DIR", "Folder for evicted pages, best on a local SSD. Default: no disk tier."
    )
    disk_bytes: int = setting(
        16 << 30, "DISK_BYTES", "Maximum size of the disk tier.",
        minimum=1 << 16, maximum=1 << 50, size=True,
    )  # fmt: skip
    disk_staging_bytes: int = setting(
        0, "DISK_STAGING_BYTES", "Memory for pages waiting to be written to disk. 0: room for "
        "128 pages, at least 64MiB, at most 1GiB and half of the pool.",
        minimum=0, maximum=1 << 40, size=True,
    )  # fmt: skip
    host_bytes: int = setting(
        0, "HOST_BYTES", "Host memory for pages evicted from a device. With a disk tier, it holds "
        "the disk's pages written or read last.",
        minimum=0, maximum=1 << 44, size=True,
    )  # fmt: skip
    pin_share_max: float = setting(
        0.25, "PIN_SHARE_MAX", "Share of the pool that operators may pin.", minimum=0.0, maximum=0.9
    )
    session_ttl_ms: int = setting(
        3_000, "SESSION_TTL_MS", "Silence after which a worker's leases end, in ms.",
        minimum=100, maximum=MINUTE_MS,
    )  # fmt: skip
    heartbeat_ms: int = setting(
        500, "PAGER_HEARTBEAT_MS", "Interval between a worker's heartbeats, in ms.",
        minimum=10, maximum=MINUTE_MS,
    )  # fmt: skip
    inbox_count_max: int = setting(
        4_096, "PAGER_INBOX_COUNT_MAX", "Maximum requests queued at the pager.",
        minimum=1, maximum=1 << 20,
    )  # fmt: skip
    kill_holders: bool = setting(
        False, "PAGER_KILL_HOLDERS", "Kill a stuck worker of this host that holds needed pages."
    )

    @property
    def disk_folder(self) -> Path | None:
        """Where evicted pages are kept, if anywhere. Raises ``ConfigError``."""
        named = f"PAGEMESH_DISK_DIR={self.disk_dir} (--disk-dir)"
        return expanded(self.disk_dir, named) if self.disk_dir else None


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The prefill and decode workers."""

    model: str = setting("", "MODEL", "Folder or Hugging Face id. Default: the bundled demo model.")
    model_name: str = setting(
        "", "MODEL_NAME", "Model name for clients. Default: the folder's name or the Hub id."
    )
    cache_dir: str = setting(
        "", "CACHE_DIR", "Folder for prepared weights. Default: in the user's cache folder."
    )
    device: Literal["cpu", "cuda", "interpreter"] = setting(
        "cpu", "DEVICE", "Where the model runs and its pages are kept. interpreter: GPU kernels on "
        "a CPU, for tests.",
    )  # fmt: skip
    dtype: Literal["auto", "float32", "int8", "bfloat16", "float16"] = setting(
        "auto",
        "DTYPE",
        "Type of weights. CPU: float32, bfloat16 or int8; GPU: float32, bfloat16 or float16. "
        "auto: float32 on a CPU, the checkpoint's type on a GPU.",
    )
    kv_dtype: Literal["auto", KvDtype] = setting(
        "auto", "KV_DTYPE", "Type of K and V in pages; the same on every worker of a host. auto: "
        "float32 on a CPU, the compute type on a GPU.",
    )  # fmt: skip
    page_size: int = setting(16, "PAGE_SIZE", "Token slots per page.", minimum=1, maximum=256)
    deterministic: bool = setting(
        False, "DETERMINISTIC", "Identical tokens whatever the batch, chunks, hits or failover."
    )
    thread_count: int = setting(
        0, "THREADS", "Threads per worker. 0: one per usable core, within the CPU quota. Workers "
        "take turns on shared cores, unless each uses at most half of them.",
        minimum=0, maximum=1024,
    )  # fmt: skip
    kernels: Literal["", "native", "reference"] = setting(
        "", "KERNELS", "CPU kernels. Default: native."
    )
    cpu_level: Literal["", "amx", "avx512_bf16", "avx512", "avx2", "portable"] = setting(
        "", "CPU_LEVEL", "Instruction set of the native kernels. Default: the best available."
    )
    sequence_count_max: int = setting(
        256, "SEQUENCE_COUNT_MAX", "Maximum sequences per step; fewer if pages run out first.",
        minimum=1, maximum=4096,
    )  # fmt: skip
    step_tokens_max: int = setting(
        512, "STEP_TOKENS_MAX", "Maximum prompt tokens per step.", minimum=1, maximum=1 << 16
    )
    itl_target_ms: int = setting(
        0, "ITL_TARGET_MS", "Target inter-token latency while prompts are computed, in ms. 0: they "
        "get 4 to 8 times as long as a step without prompts, or as --stream-ms if that is longer.",
        minimum=0, maximum=MINUTE_MS,
    )  # fmt: skip
    stream_ms: int = setting(
        40, "STREAM_MS", "Tokens less than this apart, in ms, are sent together. 0: each is sent "
        "alone, which is slower when steps are short.",
        minimum=0, maximum=1_000,
    )  # fmt: skip
    draft_tokens_max: int = setting(
        7, "DRAFT_TOKENS_MAX", "Tokens drafted by prompt lookup and verified in one step; "
        "CPU only. 0: none.",
        minimum=0, maximum=31,
    )  # fmt: skip
    waiting_count_max: int = setting(
        1_024, "WAITING_COUNT_MAX", "Maximum sequences waiting to run.", minimum=1, maximum=1 << 20
    )

    def __post_init__(self) -> None:
        """Raises ``ConfigError`` for a name that messages cannot carry."""
        check_carried("MODEL_NAME", self.model_name)

    @property
    def weight_type(self) -> AskedType:
        """The type of matrices on a CPU, where no other is supported."""
        return self.dtype if self.dtype in ("int8", "bfloat16") else "float32"

    def check_supported(self) -> None:
        """Raises ``ConfigError`` for what no worker supports yet."""
        is_cpu = self.device == "cpu"
        types = ASKED_TYPES if is_cpu else _DEVICE_TYPES
        if self.dtype not in ("auto", *types):
            raise ConfigError(
                f"PAGEMESH_DTYPE={self.dtype} (--dtype) is not supported on {self.device}; use "
                f"{' or '.join(types)}"
            )
        if self.deterministic and not is_cpu:
            raise ConfigError(
                f"PAGEMESH_DETERMINISTIC (--deterministic) is not supported on {self.device}: "
                "matrix products there depend on the batch; leave it out, or use --device cpu"
            )


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """The gateway."""

    http_host: str = setting("127.0.0.1", "HTTP_HOST", "Address to listen on.")
    http_port: int = setting(8000, "HTTP_PORT", "Port to listen on.", minimum=0, maximum=65_535)
    api_keys: Secret = setting(
        Secret(), "API_KEYS", "Accepted API keys, separated by commas. Default: no key required."
    )
    tenant_limits: str = setting(
        "", "TENANT_LIMITS", "Limits per tenant, such as \"alice:pages=25% requests=8 "
        "cache_ttl_s=600,*:pages=40%\".",
    )  # fmt: skip
    cors_origins: tuple[str, ...] = setting(
        (), "CORS_ORIGINS", "Origins whose pages may call from browsers, such as "
        "https://chat.example.com, separated by commas, or *. Default: none.",
    )  # fmt: skip
    generation_config: GenerationConfig = setting(
        "auto", "GENERATION_CONFIG", "Defaults for temperature, top_p, top_k, min_p and "
        "repetition_penalty. auto: the model's generation_config.json; none: OpenAI's.",
    )  # fmt: skip
    disaggregate: Literal["auto", "always"] = setting(
        "auto", "DISAGGREGATE", "always: prefill workers compute all but the shortest prompts. "
        "auto: where they share a decode worker's cores, it computes prompts itself while it is "
        "busy, and short ones at any time.",
    )  # fmt: skip
    request_count_max: int = setting(
        1_024, "REQUEST_COUNT_MAX", "Maximum concurrent requests.", minimum=1, maximum=1 << 20
    )
    request_timeout_ms: int = setting(
        10 * MINUTE_MS, "REQUEST_TIMEOUT_MS", "Time limit of a request, in ms.",
        minimum=100, maximum=24 * 60 * MINUTE_MS,
    )  # fmt: skip
    body_bytes_max: int = setting(
        8 << 20, "BODY_BYTES_MAX", "Maximum size of an HTTP request body.",
        minimum=1 << 10, maximum=1 << 30, size=True,
    )  # fmt: skip
    vllm_metrics: bool = setting(
        False, "VLLM_METRICS", "Also export the four gauges that Kubernetes routers read from vLLM."
    )

    @property
    def page_origins(self) -> tuple[str, ...]:
        """Origins of the pages that may call, as browsers send them. Raises ``ConfigError``."""
        return parse_origins(self.cors_origins)


@dataclass(frozen=True, slots=True)
class TelemetryConfig:
    """Logs, traces and metrics."""

    log_level: Literal["debug", "info", "warning", "error"] = setting(
        "info", "LOG_LEVEL", "Lowest severity to log."
    )
    log_format: Literal["auto", "json", "console"] = setting(
        "auto", "LOG_FORMAT", "Log format. auto: console on a terminal, json otherwise."
    )
    log_exception_text: bool = setting(
        False, "LOG_EXCEPTION_TEXT", "Log exception messages, which may contain parts of prompts."
    )
    otlp: str = computed(
        lambda: os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT", ""),
        "OTLP", "URL of an OTLP/HTTP collector for traces; empty: no traces.",
    )  # fmt: skip
    trace_ratio: float = setting(
        1.0, "TRACE_RATIO", "Share of requests to trace.", minimum=0.0, maximum=1.0
    )
    metrics_host: str = setting("127.0.0.1", "METRICS_HOST", "Address of a service's own metrics.")
    metrics_port: int = setting(
        0, "METRICS_PORT", "Port of a service's own metrics; with `up`, the first of one per "
        "service. 0: none.", minimum=0, maximum=65_535,
    )  # fmt: skip

    @property
    def traces_url(self) -> str:
        """Where traces go; empty: nowhere. Raises ``ConfigError`` for an invalid URL."""
        if not self.otlp:
            return ""
        if not is_url(self.otlp, ("http", "https")):
            raise ConfigError(
                f"PAGEMESH_OTLP={shown_urls(self.otlp)[:80]!r} (--otlp) is not the URL of an "
                "OTLP/HTTP collector such as http://127.0.0.1:4318"
            )
        return self.otlp.rstrip("/").removesuffix("/v1/traces") + "/v1/traces"

    @property
    def sampled_ratio(self) -> float:
        """Share of new traces that every hop is to record: 0 if this gateway exports no traces,
        since recording costs each hop tens of microseconds."""
        return self.trace_ratio if self.traces_url else 0.0


CONFIGS: tuple[type[object], ...] = (
    BusConfig, HostConfig, PagerConfig, WorkerConfig, GatewayConfig, TelemetryConfig,
)  # fmt: skip
"""Every configuration, for documentation and for finding unknown variables."""
