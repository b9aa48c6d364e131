"""TLS to the NATS server: whom we trust, and who we are."""

from __future__ import annotations

import ssl

from pagemesh.runtime.settings import BusConfig
from pagemesh.wire.errors import ConfigError

_OTHER_NAME = frozenset({62, 63, 64})
_OTHER_TIME = frozenset({9, 10})
"""OpenSSL's codes for a mismatch of host, mail or IP address; and for not yet valid or expired."""


def tls_context(config: BusConfig) -> ssl.SSLContext | None:
    """None when TLS was not asked for. Raises ``ConfigError`` naming the file that is wrong."""
    if config.key_file and not config.cert_file:
        raise ConfigError("PAGEMESH_NATS_TLS_KEY is set and PAGEMESH_NATS_TLS_CERT is not")
    if not config.demands_tls:
        return None
    try:
        context = ssl.create_default_context(cafile=config.ca_file or None)
    except (OSError, ssl.SSLError) as error:
        raise unusable("PAGEMESH_NATS_TLS_CA", config.ca_file, error) from None
    if config.cert_file:
        try:
            # An empty password: nobody is there to type one.
            context.load_cert_chain(config.cert_file, config.key_file or None, lambda: "")
        except (OSError, ssl.SSLError) as error:
            shown = ", ".join(filter(None, (config.cert_file, config.key_file)))
            raise unusable("PAGEMESH_NATS_TLS_CERT", shown, error) from None
    return context


def distrust(error: ssl.SSLCertVerificationError, url: str) -> ConfigError:
    """The error to show people about the certificate that the server at ``url`` presented."""
    why = error.verify_message.rstrip(".")
    if error.verify_code in _OTHER_NAME:
        what, next_step = "is for another name", "use one that it carries in PAGEMESH_NATS (--nats)"
    elif error.verify_code in _OTHER_TIME:
        what, next_step = "is not trusted", "have the server's renewed, or set this machine's clock"
    else:
        what = "is not trusted"
        next_step = "name the authority that signed it in PAGEMESH_NATS_TLS_CA (--nats-tls-ca)"
    return ConfigError(f"the certificate of the NATS server at {url} {what} ({why}): {next_step}")


def unusable(variable: str, value: str, error: OSError) -> ConfigError:
    """The error for the unusable file or files in ``value``, the setting of ``variable``."""
    reason = getattr(error, "reason", None) or error.strerror or "no PEM file"
    return ConfigError(f"{variable}={value!r} cannot be used: {str(reason).lower()}")
