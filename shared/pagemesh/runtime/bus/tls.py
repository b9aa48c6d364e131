"""TLS to the NATS server: whom we trust, and who we are."""

from __future__ import annotations

import ssl

from pagemesh.runtime.settings import BusConfig
from pagemesh.wire.errors import ConfigError


def tls_context(config: BusConfig) -> ssl.SSLContext | None:
    """None when TLS was not asked for. Raises ``ConfigError`` naming the file that is wrong."""
    if config.key_file and not config.cert_file:
        raise ConfigError("PAGEMESH_NATS_TLS_KEY is set and PAGEMESH_NATS_TLS_CERT is not")
    if not config.demands_tls:
        return None
    try:
        context = ssl.create_default_context(cafile=config.ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise _unusable("PAGEMESH_NATS_TLS_CA", config.ca_file, error) from None
    if config.cert_file:
        try:
            # The password: nobody is there to be asked for one.
            context.load_cert_chain(config.cert_file, config.key_file or None, lambda: "")
        except (OSError, ssl.SSLError) as error:
            shown = ", ".join(filter(None, (config.cert_file, config.key_file)))
            raise _unusable("PAGEMESH_NATS_TLS_CERT", shown, error) from None
    return context


def _unusable(variable: str, value: str, error: OSError) -> ConfigError:
    reason = getattr(error, "reason", None) or error.strerror or "no PEM file"
    return ConfigError(f"{variable}={value!r} cannot be used: {str(reason).lower()}")
