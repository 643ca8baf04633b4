"""Every environment variable of the package, parsed here and nowhere else. There are at most eight."""
from __future__ import annotations

import os
from pathlib import Path

import msgspec


class Env(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Parsed `SM70_TRITON_*` variables. Compared by identity: every parse is another key of the caches that depend on it.

    * `SM70_TRITON_IMPL`: `op=impl[,op=impl]`, e.g. `attn_prefill=simt`. Forces an implementation; never falls back.
    * `SM70_TRITON_CONFIG_DIR`: folder with `<arch>/<op>/*.json`, searched before the user's and the shipped configs.
    * `SM70_TRITON_CACHE_DIR`: where this package keeps the user's configs and downloads (default: the platform's cache folder).
    * `SM70_TRITON_DEBUG`: `1` checks lengths, page ids and slots of every call (synchronises with the device; not for graphs).
    """

    impl: dict[str, str]
    config_dir: Path | None
    cache_dir: Path
    debug: bool


NAMES = ("SM70_TRITON_IMPL", "SM70_TRITON_CONFIG_DIR", "SM70_TRITON_CACHE_DIR", "SM70_TRITON_DEBUG")


def _parse_impl(text: str) -> dict[str, str]:
    pairs = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        op, equals, impl = (piece.strip() for piece in item.partition("="))
        if not (op and equals and impl):
            raise ValueError(f"SM70_TRITON_IMPL={text!r}: {item!r} is not op=impl (example: attn_prefill=simt,kv_write=torch)")
        if pairs.setdefault(op, impl) != impl:
            raise ValueError(f"SM70_TRITON_IMPL={text!r} names two implementations of {op}: {pairs[op]} and {impl}")
    return pairs


def _parse_bool(name: str, text: str) -> bool:
    if text.lower() in ("", "0", "false", "no", "off"):
        return False
    if text.lower() in ("1", "true", "yes", "on"):
        return True
    raise ValueError(f"{name}={text!r} is not a switch; use 0 or 1")


def _folder(name: str, text: str) -> Path:
    try:
        return Path(text).expanduser().absolute()
    except RuntimeError:
        raise ValueError(f"{name}: {text} cannot be resolved, this user has no home folder; set {name} to a folder") from None


def _read() -> Env:
    unknown = [n for n in os.environ if n.startswith("SM70_TRITON_") and n not in NAMES]
    if unknown:
        raise ValueError(f"unknown environment variable {sorted(unknown)[0]}; accepted: {', '.join(NAMES)}")
    config_dir = None
    if text := os.environ.get("SM70_TRITON_CONFIG_DIR"):
        config_dir = _folder("SM70_TRITON_CONFIG_DIR", text)
        if not config_dir.is_dir():
            raise ValueError(f"SM70_TRITON_CONFIG_DIR={text!r} is not a folder")
    cache_dir = os.environ.get("SM70_TRITON_CACHE_DIR")
    if not cache_dir:
        import platformdirs  # only needed when nothing is set, and not free to import

        cache_dir = platformdirs.user_cache_dir("sm70_triton")
    return Env(
        impl=_parse_impl(os.environ.get("SM70_TRITON_IMPL", "")),
        config_dir=config_dir,
        cache_dir=_folder("SM70_TRITON_CACHE_DIR", cache_dir),
        debug=_parse_bool("SM70_TRITON_DEBUG", os.environ.get("SM70_TRITON_DEBUG", "")),
    )


_env: Env | None = None


def get() -> Env:
    """The variables as they were at the first call; a running server does not change under its operator's feet."""
    global _env
    if _env is None:
        _env = _read()
    return _env


def reload() -> Env:
    """Parse the variables again (tests, notebooks). Routes cached under the old ones are not used any more."""
    global _env
    _env = _read()
    return _env
