"""Certificates for servers of tests, made by openssl."""

from __future__ import annotations

import subprocess
from pathlib import Path


class Identity:
    """A self-signed certificate and its key."""

    def __init__(self, folder: Path, name: str) -> None:
        self.key, self.certificate = str(folder / f"{name}-key.pem"), str(folder / f"{name}.pem")
        command = [
            "openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2",
            "-keyout", self.key, "-out", self.certificate, "-subj", f"/CN={name}",
            "-addext", "subjectAltName=IP:127.0.0.1",
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True)
