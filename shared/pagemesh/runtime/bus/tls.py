"""TLS to the NATS server: whom we trust, and who we are."""

from __future__ import annotations

import ssl

from pagemesh.runtime.settings import BusConfig
from pagemesh.wire.errors import ConfigError

_OTHER_NAME = frozenset({62, 63, 64})
_OTHER_TIME = frozenset({9, 10})
_OTHER_AUTHORITY = frozenset({18, 19, 20, 21})
"""OpenSSL's codes for a mismatch of host, mail or IP address; for not yet valid or expired; and for
no known authority."""


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
        _load_own(context, config.cert_file, config.key_file)
    return context


def _load_own(context: ssl.SSLContext, cert_file: str, key_file: str) -> None:
    asked = False

    def no_passphrase() -> str:  # nobody is there to type one
        nonlocal asked
        asked = True
        return ""

    try:
        context.load_cert_chain(cert_file, key_file or None, no_passphrase)
    except (OSError, ssl.SSLError) as error:
        shown = ", ".join(filter(None, (cert_file, key_file)))
        made = unusable("PAGEMESH_NATS_TLS_CERT", shown, error)
        if asked:
            raise ConfigError(f"{made}; the key has a passphrase: use one without") from None
        if isinstance(error, ssl.SSLError) and not key_file:
            raise ConfigError(
                f"{made}; if the key is in another file, name that in PAGEMESH_NATS_TLS_KEY "
                "(--nats-tls-key)"
            ) from None
        raise made from None


def distrust(error: ssl.SSLCertVerificationError, config: BusConfig) -> ConfigError:
    """The error to show people about the certificate that the server presented."""
    why = error.verify_message.rstrip(".")
    if error.verify_code in _OTHER_NAME:
        what, next_step = "is for another name", "use one that it carries in PAGEMESH_NATS (--nats)"
    elif error.verify_code in _OTHER_TIME:
        what, next_step = "is not trusted", "have the server's renewed, or set this machine's clock"
    else:
        what = "is not trusted"
        next_step = "name the authority that signed it in PAGEMESH_NATS_TLS_CA (--nats-tls-ca)"
        if config.ca_file and error.verify_code in _OTHER_AUTHORITY:
            next_step += f", which {config.ca_file!r} is not"
    return ConfigError(
        f"the certificate of the NATS server at {config.shown_url} {what} ({why}): {next_step}"
    )


def unusable(variable: str, value: str, error: OSError) -> ConfigError:
    """The error for the unusable file or files in ``value``, the setting of ``variable``."""
    reason = getattr(error, "reason", None) or error.strerror or "no PEM file"
    return ConfigError(f"{variable}={value!r} cannot be used: {str(reason).lower()}")
