"""Autotune files: find, decode, look up the nearest bucket, write. Nothing here chooses a plan by itself.

One file holds one op at one set of static axes: `<root>/<arch>/<op>/<stem>.json`; its buckets differ in the dynamic axes
(M, batch, kv_len ...). A bucket carries its evidence: "measured" on a card of that compute capability, or "model".
"""
from __future__ import annotations

import logging
import math
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from . import env
from .probe import arch_name
from .types import Geometry, Sm70Error

log = logging.getLogger("sm70_triton")

SCHEMA = 1
#: A bucket serves sizes up to this many octaves away, all dynamic axes together: a plan for 8 rows must not serve 8192.
REACH = 2.0


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="source", tag="measured"):
    """Timed on a real card of the folder's compute capability; `device` is provenance, never a key."""

    device: str
    us: float
    triton: str
    driver: str


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="source", tag="model"):
    """Chosen by a pipeline model: a prediction, not a measurement."""

    model: str
    triton: str
    us: float | None = None
    note: str | None = None


class Bucket(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    at: dict[str, int]
    impl: str
    rev: int
    plan: dict[str, Any]
    evidence: Measured | Model


class ConfigFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    schema: int
    op: str
    arch: str
    static: dict[str, Any]
    buckets: list[Bucket]


class CorruptConfig(Sm70Error, ValueError):
    """A config file that cannot be used; the text names the file and what is wrong."""


def shipped_root() -> Path | None:
    """`autotune_configs/` inside the installed wheel, or beside the package in an editable install."""
    package = Path(__file__).resolve().parent
    for root in (package / "autotune_configs", package.parent / "autotune_configs"):
        if root.is_dir():
            return root
    return None


def roots() -> list[tuple[str, Path]]:
    """(source, folder) in order of precedence."""
    found = []
    settings = env.get()
    if settings.config_dir is not None:
        found.append(("config_dir", settings.config_dir))
    found.append(("user", user_root()))
    shipped = shipped_root()
    if shipped is not None:
        found.append(("shipped", shipped))
    return found


def user_root() -> Path:
    return env.get().cache_dir / "configs"


def stem(geometry: Geometry) -> str:
    """File name of a geometry's static axes: `fp16.q_heads24.kv_heads4.head_dim256...`; switches that are off are left out."""
    parts = []
    for name, value in geometry.static().items():
        if isinstance(value, bool):
            if value:
                parts.append(name)
        elif isinstance(value, str):
            parts.append(value)
        elif value is not None:
            parts.append(f"{name}{value}")
    return ".".join(parts)


def path(root: Path, arch: int, op: str, geometry: Geometry) -> Path:
    return root / arch_name(arch) / op / f"{stem(geometry)}.json"


def decode(file: Path) -> ConfigFile:
    """Strictly decode one file. Raises CorruptConfig."""
    try:
        config = msgspec.json.decode(file.read_bytes(), type=ConfigFile)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CorruptConfig(f"{file}: {error}") from error
    if config.schema != SCHEMA:
        raise CorruptConfig(f"{file}: schema {config.schema} is not {SCHEMA}, the one this version reads")
    for bucket in config.buckets:
        if not bucket.at or any(value < 1 for value in bucket.at.values()):
            raise CorruptConfig(f"{file}: bucket at {bucket.at} must name dynamic axes with values of at least 1")
    return config


def distance(at: dict[str, int], geometry: Geometry) -> float:
    """How far a bucket is from a geometry: the sum of |log2 ratio| over the dynamic axes; infinite if the axes differ."""
    dynamic = geometry.dynamic()
    if at.keys() != dynamic.keys():
        return math.inf
    return sum(abs(math.log2(at[name]) - math.log2(max(1, value))) for name, value in dynamic.items())


def nearest(config: ConfigFile, geometry: Geometry) -> list[Bucket]:
    """Buckets of a file within REACH, the nearest first; ties go to the smaller sizes, so the order is total."""
    usable = [b for b in config.buckets if distance(b.at, geometry) <= REACH]
    return sorted(usable, key=lambda b: (distance(b.at, geometry), sorted(b.at.items())))


def lookup(arch: int, op: str, geometry: Geometry) -> Iterator[tuple[str, Path, Bucket]]:
    """(source, file, bucket) in order of precedence, nearest bucket first. Unusable files warn and are passed over."""
    key = (env.get(), arch, op, stem(geometry))
    files = _files.get(key)
    if files is None:
        files = _files[key] = list(_load(arch, op, geometry))
    for source, file, config in files:
        for bucket in nearest(config, geometry):
            yield source, file, bucket


#: Files as read, by everything that selects them: the dynamic axes change with every token, the files do not.
_files: dict[tuple[env.Env, int, str, str], list[tuple[str, Path, ConfigFile]]] = {}


def clear() -> None:
    """Forget the files that were read."""
    _files.clear()


def _load(arch: int, op: str, geometry: Geometry) -> Iterator[tuple[str, Path, ConfigFile]]:
    for source, root in roots():
        file = path(root, arch, op, geometry)
        try:
            yield source, file, _checked(file, arch, op, geometry)
        except FileNotFoundError:
            continue
        except CorruptConfig as error:
            if source != "user":
                log.warning("%s; the file is passed over", error)
                continue
            config = _set_aside(file, error, arch, op, geometry)
            if config is not None:
                yield source, file, config
        except OSError as error:
            log.warning("config %s cannot be read (%s); it is passed over", file, error)


def _checked(file: Path, arch: int, op: str, geometry: Geometry) -> ConfigFile:
    """Decode a file and make sure that it is what its path says. Raises CorruptConfig."""
    config = decode(file)
    if (config.op, config.arch, config.static) != (op, arch_name(arch), geometry.static()):
        raise CorruptConfig(f"{file}: op, arch or static axes inside do not match its path")
    return config


def _set_aside(file: Path, error: CorruptConfig, arch: int, op: str, geometry: Geometry) -> ConfigFile | None:
    """Move a bad file of our own cache out of the way, for its owner to look at, unless a writer has just replaced it."""
    from filelock import FileLock, Timeout

    try:
        with FileLock(f"{file}.lock", timeout=10):
            try:
                return _checked(file, arch, op, geometry)
            except CorruptConfig:
                _move_aside(file, error)
    except FileNotFoundError:
        pass
    except (OSError, Timeout) as why:
        log.warning("%s; the file is passed over (moving it aside failed: %s)", error, why)
    return None


def _move_aside(file: Path, error: CorruptConfig) -> None:
    """The caller holds the file's lock."""
    aside = file.with_name(f"{file.name}.corrupt-{time.time_ns()}")
    os.replace(file, aside)
    log.warning("%s; the file was moved to %s", error, aside.name)


def write_atomic(file: Path, data: bytes) -> None:
    """Replace a file so that a reader, or a crash, sees the old or the new content and never a part."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, file)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def write(arch: int, op: str, geometry: Geometry, bucket: Bucket, root: Path | None = None) -> Path:
    """Add or replace one bucket of a file under a lock; other buckets are kept. Returns the file.

    A corrupt file in the user's cache is moved aside first; anywhere else it is an error, so that nothing is overwritten.
    """
    from filelock import FileLock

    file = path(root or user_root(), arch, op, geometry)
    if not bucket.at or bucket.at.keys() != geometry.dynamic().keys() or min(bucket.at.values()) < 1:
        raise ValueError(f"bucket.at={bucket.at}: its axes must be exactly {sorted(geometry.dynamic())}, with values of at least 1")
    file.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock"):
        kept: list[Bucket] = []
        try:
            kept = [b for b in _checked(file, arch, op, geometry).buckets if b.at != bucket.at]
        except FileNotFoundError:
            pass
        except CorruptConfig as error:
            if root is not None:
                raise
            _move_aside(file, error)
        buckets = sorted([*kept, bucket], key=lambda b: sorted(b.at.items()))
        config = ConfigFile(schema=SCHEMA, op=op, arch=arch_name(arch), static=geometry.static(), buckets=buckets)
        write_atomic(file, msgspec.json.format(msgspec.json.encode(config), indent=1) + b"\n")
    clear()
    return file
