"""Default sampling parameters: OpenAI's, or those that the model's own ``generation_config.json``
recommends."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import msgspec

from pagemesh.gateway.api.openai_types import MinP, RepetitionPenalty, Temperature, TopK, TopP
from pagemesh.runtime.model_folder import read_config
from pagemesh.runtime.settings import GenerationConfig
from pagemesh.wire.errors import ConfigError

FILE_NAME = "generation_config.json"


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The values of parameters that are omitted or null."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: all."""
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    @property
    def recommended(self) -> dict[str, float]:
        """Those that differ from OpenAI's, by name."""
        own = dataclasses.asdict(self)
        return {name: value for name, value in own.items() if value != getattr(OPENAI, name)}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.recommended.items())


OPENAI = SamplingDefaults()


class _Recommended(msgspec.Struct):
    """The fields of the file that clients can send as well, within the same bounds."""

    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None


def sampling_defaults(folder: Path, source: GenerationConfig) -> SamplingDefaults:
    """The defaults for the model in ``folder``: OpenAI's, replaced by what its file says when
    ``source`` is ``auto``. ``do_sample`` is ignored, as other servers do. Raises ``ConfigError``
    for a file that cannot be read or holds a value that no client may send."""
    path = folder / FILE_NAME
    if source == "none" or not path.is_file():
        return OPENAI
    try:
        found = msgspec.convert(read_config(path), _Recommended)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{path}: {error}; fix it, or ignore it with --generation-config none "
            "(PAGEMESH_GENERATION_CONFIG)"
        ) from None
    said = msgspec.structs.asdict(found)
    known = {name: value for name, value in said.items() if value is not None}
    if found.top_k is not None:
        known["top_k"] = max(0, found.top_k)
    return dataclasses.replace(OPENAI, **known)
